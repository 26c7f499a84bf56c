"""Sequences whose tokens were drawn from sets, with dense log-probs and gradients in float64: the oracle of masks."""

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from foreroute.trace import RoutingTrace
from tests.trainers.verl.verl_book import Book

TEMPERATURE = 0.7


def field_of(sets):
    counts = np.array([len(each) for each in sets], np.int32)
    return {"counts": counts, "ids": np.array([i for each in sets for i in each], np.int32)}


class Scores:
    """A book whose tokens were drawn from sets: some of one, of all tokens, and a tool's token in each response."""

    def __init__(self, folder, **settings):
        self.book = book = Book(folder, **settings)
        rng, self.sets = np.random.default_rng(3), []
        self.vocabulary = book.model.config.vocab_size
        for number, (_, response) in enumerate(book.pairs):
            own = []
            for r, token in enumerate(response.tolist()):
                size = (1, 5, 40, self.vocabulary)[(number + r) % 4]
                others = rng.permutation(np.setdiff1d(np.arange(self.vocabulary), [token]))[: size - 1]
                own.append([] if r == 1 else rng.permutation([token, *others]).tolist())
            self.sets.append(own)
        self.logprobs = self.dense()
        book.sampled = [
            row[-len(pair[1]) :].float().numpy() for row, pair in zip(self.logprobs, book.pairs, strict=True)
        ]

    def dense(self):
        """Of each sequence, float64 [T - 1]: dense logits, minus infinity outside of sets; 0 where none was drawn from.
        Their gradients are kept.
        """
        model, found = self.book.model.double(), []
        for pair, routes, sets in zip(self.book.pairs, self.book.routes, self.sets, strict=True):
            tokens = torch.from_numpy(np.concatenate(pair))
            trace = RoutingTrace.from_sequences(self.book.routed.spec, [tokens.numpy()], [routes])
            with self.book.routed.replay(trace):
                logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / TEMPERATURE
            left_out = torch.ones(logits.shape, dtype=torch.bool)
            for r, own in enumerate(sets):
                left_out[len(pair[0]) - 1 + r, own] = False
            drawn = ~left_out.all(-1)
            scores = logits[drawn].masked_fill(left_out[drawn], -torch.inf).log_softmax(-1)
            scores = scores.gather(-1, tokens[1:][drawn, None])[:, 0]
            (-scores.sum() / 100).backward()
            found.append(torch.zeros(len(tokens) - 1, dtype=torch.float64).index_put((drawn,), scores.detach()))
        self.gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
        model.zero_grad()
        model.float()
        return found

    def batch(self, form="a field", sets=None):
        batch, fields = self.book.batch(), [field_of(own) for own in (sets or self.sets)]
        batch["response_mask"][:, 1] = 0
        if form == "extra fields":
            fields = [{"sampling_mask": each, "turn_scores": []} for each in fields]
        name = "extra_fields" if form == "extra fields" else "sampling_mask"
        if form != "none":
            batch[name] = NonTensorStack.from_list([NonTensorData(each) for each in fields])
        return batch


def require_scored(found, scores):
    for one, other in zip(found, scores.logprobs, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-5)
        assert ((one == 0) == (other == 0)).all()


def require_learned(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        near = 1e-5 * float(gradient.abs().max())
        np.testing.assert_allclose(gradients[name].numpy(), gradient.numpy(), rtol=0, atol=near)

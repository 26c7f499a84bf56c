"""The oracle: sequences whose routes are written down, and what a plain model makes of them.

A part of the routes is drawn at random, so that no model would take them. Nothing here asks an engine of verl.
`Scores` has sets too, of which tokens were drawn: its log-probs and gradients are of dense logits, in float64.
"""

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack
from transformers import Qwen3MoeForCausalLM

from foreroute.adapters import hf
from foreroute.trace import RoutingTrace
from tests.trainers.given_experts import drawn_anew, native
from tests.trainers.verl.verl_batches import PROMPT, RESPONSE, padded

TEMPERATURE = 0.7
"""Of `Scores`."""


class Book:
    """Sequences of a rollout, each with routes [T - 1, 2, 2], a share of which is replaced, and log-probs of its
    response, near those of the model on these routes.
    """

    def __init__(self, folder, *, count=6, seed=0, replaced=0.15):
        rng = np.random.default_rng(seed)
        self.model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.set_experts_implementation("eager")  # the others know no float64
        self.routed = hf.attach(self.model)
        lengths = [(int(rng.integers(2, PROMPT + 1)), int(rng.integers(3, RESPONSE + 1))) for _ in range(count)]
        self.pairs, self.given = [tuple(rng.integers(2, 200, n) for n in pair) for pair in lengths], [{}] * count
        self.draw(rng, replaced)

    def draw(self, rng, replaced, *, spread=0.2, first=0.8):
        """Routes of the pairs, and log-probs so far from those on them; more than twofold, in one token of each."""
        self.native = [native(self.model, tokens, **given) for tokens, given in self.sequences()]
        self.routes, noise = [], []
        for (_, response), (ids, _) in zip(self.pairs, self.native, strict=True):
            self.routes.append(drawn_anew(ids[:-1], replaced, rng))
            noise.append(rng.normal(0, spread, len(response)))
            noise[-1][0] += first
        self.sampled = [
            (logprobs[-len(drawn) :].numpy() + drawn).astype(np.float32)
            for logprobs, drawn in zip(self.replayed(), noise, strict=True)
        ]

    def sequences(self):
        """Tokens, and what else the model is given with them."""
        return [(np.concatenate(pair), given) for pair, given in zip(self.pairs, self.given, strict=True)]

    def on_routes(self):
        """Tokens [T] and logits [T - 1, V] of each sequence, a replay of its routes open."""
        for (tokens, given), routes in zip(self.sequences(), self.routes, strict=True):
            with self.routed.replay(RoutingTrace.from_sequences(self.routed.spec, [tokens], [routes])):
                ids = torch.from_numpy(tokens)
                yield ids, self.model(input_ids=ids[None], use_cache=False, **given).logits[0, :-1]

    @torch.no_grad()
    def replayed(self, dtype=torch.float32):
        """Log-probs [T - 1] of each sequence, alone, on its routes, by the Hugging Face adapter."""
        self.model.to(dtype)
        found = [logprobs_of(*each) for each in self.on_routes()]
        self.model.float()
        return found

    def descended(self, share):
        """Weights in float64, by name, after a step of gradient descent at rate 1 along a share of the gradient of
        `mean_log_prob`, and before it.
        """
        self.model.double()
        for each, (_, response) in zip(self.on_routes(), self.pairs, strict=True):
            (-logprobs_of(*each)[-len(response) :].sum() / 100).backward()
        weights = {name: (each.detach().clone(), each.grad) for name, each in self.model.named_parameters()}
        self.model.zero_grad()
        self.model.float()
        return [{name: each - of * gradient for name, (each, gradient) in weights.items()} for of in (share, 0)]

    def exact(self):
        """Those in float64, and how far those in float32 are from them."""
        exact = self.replayed(torch.float64)
        return exact, max(float((a - b).abs().max()) for a, b in zip(exact, self.replayed(), strict=True))

    def log_ratios(self):
        """float64, of the model on the routes to what sampled, for every sampled token."""
        pairs = zip(self.replayed(), self.sampled, strict=True)
        return np.concatenate([ours[-len(theirs) :].numpy() - theirs for ours, theirs in pairs]).astype(np.float64)

    def by_tokens(self, routes=None):
        """{tokens: routes}, by default those of the book."""
        found = zip(self.sequences(), routes or self.routes, strict=True)
        return {tuple(tokens.tolist()): own for (tokens, _), own in found}

    def batch(self, *, routes=True):
        """As verl's agent loop pads it; the layer axis counts dense layers."""
        layers = self.model.config.get_text_config().num_hidden_layers
        by_tokens = self.by_tokens()

        def wide(tokens):
            rows = by_tokens[tuple(tokens)]
            dense = layers - rows.shape[1]
            return np.concatenate([np.zeros((len(rows), dense, 2), rows.dtype), rows], axis=1)

        batch = padded(self.pairs, wide)
        batch["rollout_log_probs"] = torch.zeros(len(self.pairs), RESPONSE)
        for s, logprobs in enumerate(self.sampled):
            batch["rollout_log_probs"][s, : len(logprobs)] = torch.from_numpy(logprobs)
        if not routes:
            del batch["routed_experts"]
        return batch


def logprobs_of(tokens, logits):
    return logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


class Scores(Book):
    """A book whose tokens were drawn from sets: some of one, of all tokens, and a tool's token in each response."""

    def __init__(self, folder, **settings):
        super().__init__(folder, **settings)
        rng, self.sets = np.random.default_rng(3), []
        vocabulary = self.model.config.vocab_size
        for number, (_, response) in enumerate(self.pairs):
            own = []
            for r, token in enumerate(response.tolist()):
                size = (1, 5, 40, vocabulary)[(number + r) % 4]
                others = rng.permutation(np.setdiff1d(np.arange(vocabulary), [token]))[: size - 1]
                own.append([] if r == 1 else rng.permutation([token, *others]).tolist())
            self.sets.append(own)
        self.logprobs, self.model = [], self.model.double()
        for (tokens, logits), (prompt, _), sets in zip(self.on_routes(), self.pairs, self.sets, strict=True):
            left_out = torch.ones(logits.shape, dtype=torch.bool)
            for r, own in enumerate(sets):
                left_out[len(prompt) - 1 + r, own] = False
            is_drawn = ~left_out.all(-1)
            masked = (logits / TEMPERATURE).masked_fill(left_out & is_drawn[:, None], -torch.inf)
            scores = logprobs_of(tokens, masked)
            (-scores[is_drawn].sum() / 100).backward()
            self.logprobs.append(scores.detach() * is_drawn)
        self.gradients = {name: each.grad.clone() for name, each in self.model.named_parameters()}
        self.model.zero_grad()
        self.model.float()
        self.sampled = [
            row[-len(response) :].float().numpy() for row, (_, response) in zip(self.logprobs, self.pairs, strict=True)
        ]

    def batch(self, form="a field", sets=None):
        batch, fields = super().batch(), [field_of(own) for own in (sets or self.sets)]
        batch["response_mask"][:, 1] = 0
        if form == "extra fields":
            fields = [{"sampling_mask": each, "turn_scores": []} for each in fields]
        name = "extra_fields" if form == "extra fields" else "sampling_mask"
        if form != "none":
            batch[name] = NonTensorStack.from_list([NonTensorData(each) for each in fields])
        return batch


def field_of(sets):
    counts = np.array([len(each) for each in sets], np.int32)
    return {"counts": counts, "ids": np.array([i for each in sets for i in each], np.int32)}


def require_scored(found, scores):
    for one, other in zip(found, scores.logprobs, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-5)
        assert ((one == 0) == (other == 0)).all()


def require_learned(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        near = 1e-5 * float(gradient.abs().max())
        np.testing.assert_allclose(gradients[name].numpy(), gradient.numpy(), rtol=0, atol=near)

"""The oracle: a rollout whose routes are written down by its tokens, and what the experts were really given.

Nothing here asks foreroute. Routes are the policy's own, seen by plain hooks, with a part of them replaced at random,
so that every sequence has routes that no model would take. Experts are watched by hooks too.
"""

from contextlib import contextmanager

import numpy as np
import torch

from examples.trl.tiny import tokenizer

END = 1


class Book:
    """A `rollout_func` of random completions, and the routes [T - 1, L, K] that it returned for each sequence.

    Args:
        model: the policy.
        replaced: share of (token, layer) whose experts are drawn at random.
        change: applied to the routes before they are returned, but not to those written down.
    """

    def __init__(self, model, *, replaced=0.1, longest=10, seed=0, change=lambda routes: routes):
        self.routes, self.logprobs, self.prompt_lengths, self.native = {}, {}, {}, {}
        self._model, self._replaced, self._longest, self._change = model, replaced, longest, change
        self._rng = np.random.default_rng(seed)

    def __call__(self, prompts, trainer):
        texts = tokenizer()
        prompt_ids = [texts(prompt)["input_ids"] for prompt in prompts]
        completions = [self._completion() for _ in prompts]
        sequences = [tuple(p + c) for p, c in zip(prompt_ids, completions, strict=True)]
        returned = []
        for prompt, sequence in zip(prompt_ids, sequences, strict=True):
            self.native[sequence] = ids, _ = native(self._model, sequence)
            routes = self._drawn(ids)[:-1]
            self.routes[sequence], self.prompt_lengths[sequence] = routes, len(prompt)
            drawn = self._rng.normal(0, 0.5, len(sequence) - len(prompt))
            self.logprobs[sequence] = self.native[sequence][1][len(prompt) - 1 :] + drawn
            returned.append(routes)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": [self.logprobs[sequence].tolist() for sequence in sequences],
            "routed_experts": self._change(returned),
        }

    def _completion(self):
        """Half of them end by themselves, the others are truncated."""
        length = int(self._rng.integers(2, self._longest))
        tokens = self._rng.integers(2, 200, length).tolist()
        return [*tokens, END] if self._rng.random() < 0.5 else tokens

    def _drawn(self, ids_TLK):
        drawn = ids_TLK.copy()
        cells = self._rng.random(ids_TLK.shape[:2]) < self._replaced
        random = np.argsort(self._rng.random((*ids_TLK.shape[:2], 8)), axis=-1)[..., : ids_TLK.shape[2]]
        drawn[cells] = random[cells]
        return drawn


class Drawn:
    """A `rollout_func` of tokens and routes that no model had a part in. `routes` is by tokens, as a `Book` has it.

    With a skew, experts are wanted the more the lower their ids.
    """

    def __init__(self, rank, skew=0.0):
        self.routes, self._rng, self._skew = {}, np.random.default_rng(rank), np.linspace(0, skew, 8)

    def __call__(self, prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [self._rng.integers(2, 200, self._rng.integers(2, 10)).tolist() for _ in prompts]
        for prompt, completion in zip(prompt_ids, completions, strict=True):
            shape = (len(prompt) + len(completion) - 1, 3, 8)
            self.routes[tuple(prompt + completion)] = np.argsort(self._rng.random(shape) + self._skew, axis=-1)[..., :2]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": [[-3.0] * len(completion) for completion in completions],
            "routed_experts": list(self.routes.values())[-len(prompts) :],
        }


@torch.no_grad()
def native(model, tokens):
    """int64 [T, L, K] and float32 [T - 1]: what a model picks and expects on a sequence, alone and unpadded."""
    ids = torch.tensor([tokens])
    with watched(model) as batches:
        hidden = trunk_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    logprobs = model.get_output_embeddings()(hidden)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    return batches[-1].ids_LRK().transpose(1, 0, 2), logprobs[0, :, 0].numpy()


def trunk_of(model):
    return next(module for module in model.modules() if type(module).__name__ in ("Qwen3MoeModel", "Qwen3VLMoeModel"))


class Batch:
    """One forward of the trunk, and every call of its experts, those of recomputations included.

    Attributes:
        grad: whether it is an update.
        adapters: whether PEFT's adapters were on.
        of_book: whether the book asked for it.
    """

    def __init__(self, input_ids, mask, *, grad, adapters):
        self.input_ids, self.grad, self.adapters = input_ids, grad, adapters
        self.of_book = mask is None
        self.mask = torch.ones_like(input_ids) if mask is None else mask
        self.calls = []

    def ids_LRK(self):
        return np.stack([ids for _, ids in self.calls[: max(layer for layer, _ in self.calls) + 1]])

    def sequences(self):
        """(row, first and end of what is no padding, tokens) of each row."""
        for row, (ids, mask) in enumerate(zip(self.input_ids.tolist(), self.mask.tolist(), strict=True)):
            first = mask.index(1)
            tokens = ids[first:]
            while tokens[-1] == 0:  # completions are padded on the right, and hold no padding token
                tokens.pop()
            yield row, first, first + sum(mask), tuple(tokens)


@contextmanager
def watched(model):
    """Every batch that runs through the trunk while the context is open."""
    batches, handles = [], []

    def begin(_, args, kwargs):
        adapters = not any(getattr(module, "disable_adapters", False) is True for module in model.modules())
        batches.append(
            Batch(
                kwargs["input_ids"].clone(),
                kwargs.get("attention_mask"),
                grad=torch.is_grad_enabled(),
                adapters=adapters,
            )
        )

    handles.append(trunk_of(model).register_forward_pre_hook(begin, with_kwargs=True))
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    for layer, module in enumerate(experts):

        def note(_, args, layer=layer):
            batches[-1].calls.append((layer, args[1].detach().numpy().copy()))

        handles.append(module.register_forward_pre_hook(note))
    yield batches
    for handle in handles:
        handle.remove()


def require_followed(batch, book):
    """Every call of every layer was given the routes of the book, row by row. Returns the sequences."""
    width = batch.input_ids.shape[1]
    for row, first, end, tokens in batch.sequences():
        routes = book.routes[tokens]
        routed = min(end - first, len(routes))
        for layer, ids in batch.calls:
            given = ids.reshape(len(batch.input_ids), width, -1)[row, first : first + routed]
            assert np.array_equal(given, routes[:routed, layer]), f"row {row}, layer {layer}"
    return [tokens for *_, tokens in batch.sequences()]


def follows(batch, book):
    try:
        require_followed(batch, book)
    except AssertionError:
        return False
    return True


def log_ratios(book):
    """Of the policy's own probabilities to those of the book, at every sampled token: no padding, no batches."""
    return np.concatenate(
        [book.native[s][1][book.prompt_lengths[s] - 1 :] - logprobs for s, logprobs in book.logprobs.items()]
    )


def differing_cells(book):
    """For each routed token of each sequence, in how many layers the book's experts are not the policy's own."""
    return [
        sum(set(ours) != set(theirs) for ours, theirs in zip(row, own, strict=True))
        for sequence, routes in book.routes.items()
        for row, own in zip(routes.tolist(), book.native[sequence][0][:-1].tolist(), strict=True)
    ]

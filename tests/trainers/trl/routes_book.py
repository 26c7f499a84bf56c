"""The oracle: rollouts whose routes are written down by their tokens. Nothing here asks foreroute."""

import numpy as np

from examples.trl.tiny import tokenizer
from tests.trainers.given_experts import drawn_anew, native

END = 1


class Book:
    """A `rollout_func` of random completions, and the routes [T - 1, L, K] that it returned for each sequence.

    They are the model's own but for a share that is drawn at random, so that no model would take them. A change of them
    is returned, and not written down.
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
        for prompt, sequence in zip(prompt_ids, sequences, strict=True):
            self.native[sequence] = ids, logprobs = native(self._model, sequence)
            self.routes[sequence] = drawn_anew(ids, self._replaced, self._rng)[:-1]
            self.prompt_lengths[sequence] = len(prompt)
            drawn = self._rng.normal(0, 0.5, len(sequence) - len(prompt))
            self.logprobs[sequence] = logprobs[len(prompt) - 1 :] + drawn
        logprobs = [self.logprobs[sequence].tolist() for sequence in sequences]
        return output(prompt_ids, completions, logprobs, self._change([self.routes[each] for each in sequences]))

    def _completion(self):
        """Half of them end by themselves, the others are truncated."""
        tokens = self._rng.integers(2, 200, self._rng.integers(2, self._longest)).tolist()
        return [*tokens, END] if self._rng.random() < 0.5 else tokens


class Drawn:
    """A `rollout_func` of tokens and routes that no model had a part in. `routes` is by tokens, as a `Book` has it.

    With a skew, experts are wanted the more the lower their ids. Without a rank, all hangs on the prompt alone.
    """

    def __init__(self, rank=None, skew=0.0):
        self.routes, self._rank, self._skew = {}, rank, np.linspace(0, skew, 8)
        self._rng = np.random.default_rng(rank)

    def __call__(self, prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions, routes = [], []
        for number, prompt in enumerate(prompt_ids):
            if self._rank is None:
                self._rng = np.random.default_rng([*prompt, prompt_ids[:number].count(prompt)])
            completions.append(self._rng.integers(2, 200, self._rng.integers(2, 10)).tolist())
            shape = (len(prompt) + len(completions[-1]) - 1, 3, 8)
            routes.append(np.argsort(self._rng.random(shape) + self._skew, axis=-1)[..., :2])
            self.routes[tuple(prompt + completions[-1])] = routes[-1]
        return output(prompt_ids, completions, [[-3.0] * len(completion) for completion in completions], routes)


def output(prompts, completions, logprobs, routes):
    return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs, "routed_experts": routes}


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

"""Routes, log-probs and other decisions of `model.generate`, as TRL calls it, without a change to what is sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitNormalization, LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from foreroute.adapters.hf import RoutedTransformer
from foreroute.capture.sampling_masks import masks_of_steps
from foreroute.core.hooks import overridden
from foreroute.errors import ConfigError, ForerouteError, ReplayError
from foreroute.replay import Recording
from foreroute.trace import SAMPLING, RoutingTrace
from foreroute.trainers.trl.rollout_func import join_tokens

REMEDY = "return the routes from a rollout_func, or take replay='R2'"

PROCESSORS = "_get_logits_processor"
"""Method of a transformers model that lists what changes scores before a token is drawn; a caller's come first."""

MOST_MOVED = 1e-4
"""Nats by which rounding may change the distance of two scores."""


class GenerateSource:
    """Watches the generations of one model.

    At a `temperature`, that R3 scores sampled tokens at, the sets that they were drawn from are kept too, and what else
    changes scores is noted for `require_unmoved`. Without one, what cannot be watched is sampled once more by itself,
    from the same random numbers, before the error is raised.
    """

    def __init__(self, routed: RoutedTransformer, *, indexers: bool, temperature: float | None) -> None:
        self._routed = routed
        self._indexers = indexers
        self._temperature = temperature
        self._moving: list[str] = []  # classes of processors of turns in which scores were changed otherwise
        self._seen: list[tuple[Recording, SampledTokens, Tensor] | ForerouteError] = []  # of each call of generate
        # whose processors are asked for: PEFT's wrapper passes `generate` on to the model that it wraps
        model: Any = routed.model
        self._sampler = model.get_base_model() if is_peft_model(model) else model

    def begin_rollout(self) -> None:
        """Forget what processors did in the rollout before."""
        self._moving = []

    def require_unmoved(self) -> None:
        """Raise `ConfigError` where processors did more to scores of a turn that was read than to leave tokens out."""
        if self._moving:
            raise ConfigError(
                f"among {', '.join(dict.fromkeys(self._moving))}, that generation_kwargs or the model's "
                "generation_config ask for, are some that change scores in a way that no sampling mask shows, as a "
                f"penalty, a bias, or another temperature than {self._temperature}, that TRL scores at, so that R3 "
                "would score others than those that tokens were drawn with; leave them out, set temperature in "
                "GRPOConfig, or take replay='R2'"
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep what each call of `generate` gives while the context is open."""
        self._seen = []
        with overridden(self._routed.model, "generate", self._generate):
            yield

    def read(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], weight_version: int
    ) -> tuple[RoutingTrace, list[NDArray[np.float32]]]:
        """Read routes of a turn, and log-probs of the distribution that was drawn from. Raises where there are none."""
        if len(self._seen) != 1:
            raise ReplayError(
                f"the model's generate() ran {len(self._seen)} times in one turn, expected once; this way of "
                f"sampling is not known: {REMEDY}"
            )
        (seen,) = self._seen
        self._seen = []
        if isinstance(seen, ForerouteError):
            raise seen
        recording, sampled, sequences = seen
        try:
            trace = recording.rollout(join_tokens(prompts, completions)).with_weight_version(weight_version)
        except ReplayError as error:
            raise ReplayError(f"the model's generate() is not one that can be watched: {REMEDY}. {error}") from error
        host = sampled.logprobs_of(sequences).cpu().numpy()
        if bool(sampled.is_moved):
            self._moving += sampled.processors
        if sampled.masks:
            lengths = [np.array(list(map(len, each)), np.int64) for each in (prompts, completions)]
            trace = trace.with_stream(SAMPLING, masks_of_steps(sampled.kept, sampled.num_choices, *lengths))
        return trace, [host[s, : len(completion)] for s, completion in enumerate(completions)]

    def _generate(self, generate: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        sampled = SampledTokens(self._temperature)
        random = torch.get_rng_state(), torch.cuda.get_rng_state_all()

        def with_sampled(make: Callable[..., LogitsProcessorList], *args: Any, **kwargs: Any) -> LogitsProcessorList:
            processors = make(*args, **kwargs)
            # a min_p of 0 leaves nothing out, and sets of the whole vocabulary are large
            others = [each for each in processors if type(each) not in (TemperatureLogitsWarper, LogitNormalization)]
            sampled.processors = [type(each).__name__ for each in processors]
            sampled.masks = self._temperature is not None and any(getattr(each, "min_p", None) != 0 for each in others)
            return LogitsProcessorList([sampled.begin_step, *processors, sampled])

        try:
            with (
                self._routed.record(indexers=self._indexers) as recording,
                overridden(self._sampler, PROCESSORS, with_sampled),
            ):
                sequences = generate(*args, **kwargs)
            self._seen.append((recording, sampled, sequences))
        except ForerouteError as error:
            if self._temperature is not None:
                raise
            torch.set_rng_state(random[0])
            torch.cuda.set_rng_state_all(random[1])
            sequences = generate(*args, **kwargs)
            self._seen.append(error)
        return sequences


class SampledTokens(LogitsProcessor):
    """The last processor: keeps the log-probability of every sampled token, and its set, and changes no score.

    At a temperature, it sees whether the tokens that are left have the distances that the model gave them.
    """

    def __init__(self, temperature: float | None) -> None:
        self.masks = False  # whether to keep the sets
        self.kept: list[
            tuple[NDArray[np.int64], NDArray[np.int64]]
        ] = []  # of each step, tokens left of a sequence that lost some
        self.processors: list[str] = []  # classes of those before it
        self.num_choices = 0  # tokens of the vocabulary, once there was a step
        self.is_moved: Tensor | bool = False  # whether processors did more than to leave tokens out
        self._temperature = temperature
        self._wanted: Tensor | None = None  # [B, V], the model's scores of the step at the temperature
        self._last: Tensor | None = None  # [B, V], log-probs of the step whose tokens are not known yet
        self._sampled: list[Tensor] = []  # of each step, [B]

    def begin_step(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Stand before all processors, and see what the model gives."""
        self._wanted = None if self._temperature is None else scores / self._temperature
        return scores

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._add_logprobs(input_ids[:, -1])  # of the tokens of the step before, which are known now
        self._last = scores.float().log_softmax(-1)
        is_left = scores != -torch.inf
        if self._wanted is not None:
            moved = scores - self._wanted
            highest, lowest = moved.masked_fill(~is_left, -torch.inf), moved.masked_fill(~is_left, torch.inf)
            self.is_moved = self.is_moved | (highest.amax(-1) - lowest.amin(-1) > MOST_MOVED).any()
        if self.masks:
            self.num_choices = scores.shape[1]
            sequences, ids = torch.nonzero(is_left & ~is_left.all(-1, keepdim=True)).cpu().numpy().T
            self.kept.append((sequences, ids))
        return scores

    def logprobs_of(self, sequences: Tensor) -> Tensor:
        """Give the log-probs of what `generate` returned, float32 [B, R]."""
        self._add_logprobs(sequences[:, -1])
        if not self._sampled:
            raise ReplayError(f"the model's generate() draws tokens past its logits processors: {REMEDY}")
        return torch.stack(self._sampled, dim=1)

    def _add_logprobs(self, tokens_B: Tensor) -> None:
        if self._last is not None:
            self._sampled.append(self._last.gather(-1, tokens_B[:, None])[:, 0])
            self._last = None

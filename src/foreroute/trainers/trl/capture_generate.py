"""Routes and log-probs of `model.generate`, as TRL calls it, without a change to what is sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from foreroute.adapters.hf import RoutedTransformer
from foreroute.adapters.hf.model import require_no_beams
from foreroute.errors import ReplayError
from foreroute.replay import Recording, overridden
from foreroute.trace import RoutingTrace
from foreroute.trainers.trl.rollout import joined_tokens


class GenerateSource:
    """Watches the generations of one model.

    Args:
        routed: the policy.
        temperature: that TRL samples with, and divides the trainer's logits by.
    """

    def __init__(self, routed: RoutedTransformer, temperature: float) -> None:
        self._routed = routed
        self._temperature = temperature
        self._seen: list[tuple[Recording, Tensor]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Stand before the model's `generate`."""
        self._seen = []
        with overridden(self._routed.model, "generate", self._generate):
            yield

    def _generate(self, generate: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        require_no_beams(self._routed.model, args, kwargs)
        sampled = SampledLogProbs(self._temperature)
        processors = LogitsProcessorList([*(kwargs.pop("logits_processor", None) or []), sampled])
        with self._routed.record() as recording:
            sequences = generate(*args, logits_processor=processors, **kwargs)
        self._seen.append((recording, sampled.of(sequences)))
        return sequences

    def captured(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], weight_version: int
    ) -> tuple[RoutingTrace, list[NDArray[np.float32]]]:
        """See `RouteSource`. Log-probs are those at the temperature, before top-k, top-p and min-p."""
        if len(self._seen) != 1:
            raise ReplayError(
                f"the model's generate() ran {len(self._seen)} times in one rollout, expected once; this way of "
                "sampling is not known. Return the routes from a rollout_func, or take replay='R2'"
            )
        ((recording, logprobs_BR),) = self._seen
        self._seen = []
        trace = recording.rollout(joined_tokens(prompts, completions)).with_weight_version(weight_version)
        host = logprobs_BR.cpu().numpy()
        return trace, [host[s, : len(completion)] for s, completion in enumerate(completions)]


class SampledLogProbs(LogitsProcessor):
    """Notes the log-probability of every sampled token and changes no score.

    Args:
        temperature: divides the logits.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._last: Tensor | None = None
        self._sampled: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Called before a token is sampled, when the one before it is known."""
        self._note(input_ids[:, -1])
        self._last = (scores.float() / self._temperature).log_softmax(-1)
        return scores

    def of(self, sequences: Tensor) -> Tensor:
        """float32 [B, R], for what `generate` returned."""
        self._note(sequences[:, -1])
        return torch.stack(self._sampled, dim=1)

    def _note(self, tokens_B: Tensor) -> None:
        if self._last is not None:
            self._sampled.append(self._last.gather(-1, tokens_B[:, None])[:, 0])
            self._last = None

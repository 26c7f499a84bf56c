"""A rollout that was ended before all responses were, and may be resumed under other weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.capture import Generation
from foreroute.engines.base import SampledSequence
from foreroute.trace import RoutingTrace, concatenate, extended


@dataclass(frozen=True, eq=False)
class PartialGeneration:
    """S sequences, of which some were aborted and may be resumed.

    Attributes:
        trace: tokens (prompt, then what was sampled so far) and routes; rows keep the version that computed them.
        prompt_lengths: int64 [S].
        logprobs_R: float32 [R], of the sampled tokens, sequence after sequence.
        finished_S: bool [S].
    """

    trace: RoutingTrace
    prompt_lengths: NDArray[np.int64]
    logprobs_R: NDArray[np.float32]
    finished_S: NDArray[np.bool_]

    @classmethod
    def of(cls, sequences: Sequence[SampledSequence], traces: Sequence[RoutingTrace]) -> PartialGeneration:
        """Sequences and their traces, in order."""
        return cls(
            concatenate(traces),
            np.array([len(s.prompt) for s in sequences], np.int64),
            np.concatenate([s.logprobs for s in sequences]),
            np.array([s.finished for s in sequences], np.bool_),
        )

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """int64 [S], tokens sampled so far."""
        return self.trace.lengths - self.prompt_lengths

    @property
    def leading_rows(self) -> NDArray[np.int64]:
        """int64 [S], how many rows at the start of each sequence are routed."""
        per_sequence = np.split(self.trace.valid_N, self.trace.offsets[1:-1])
        return np.array([int(np.logical_and.accumulate(valid).sum()) for valid in per_sequence], np.int64)

    def logprobs(self) -> list[NDArray[np.float32]]:
        """S arrays float32 [R], one per sequence."""
        return np.split(self.logprobs_R, np.cumsum(self.response_lengths)[:-1])

    def generation(self) -> Generation:
        """All sequences, for training.

        Raises:
            TraceContentError: when a sequence has no sampled token yet.
        """
        return Generation(self.trace, self.prompt_lengths, self.logprobs_R)

    def resumed(self, open_S: NDArray[np.int64], later: PartialGeneration) -> PartialGeneration:
        """The same sequences, those of `open_S` gone on with as `later` has them: its prompts are what they were."""
        logprobs = self.logprobs()
        for s, more in zip(open_S, later.logprobs(), strict=True):
            logprobs[s] = np.concatenate([logprobs[s], more])
        # the continued sequences stand behind all old ones, and are moved to where their beginnings were
        order = np.arange(len(self.trace))
        order[open_S] = len(order) + np.arange(len(open_S))
        joined = concatenate([self.trace, extended(self.trace.select(open_S), later.trace)]).select(order)
        finished = self.finished_S.copy()
        finished[open_S] = later.finished_S
        return PartialGeneration(joined, self.prompt_lengths, np.concatenate(logprobs), finished)

"""Rollouts that were aborted and may go on under other weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.capture import Generation
from foreroute.engines.sampled import Sampled
from foreroute.trace import RoutingTrace, concatenate


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
    def of(cls, sequences: Sequence[Sampled], traces: Sequence[RoutingTrace]) -> PartialGeneration:
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

    def logprobs(self) -> list[NDArray[np.float32]]:
        """S arrays float32 [R], one per sequence."""
        return np.split(self.logprobs_R, np.cumsum(self.response_lengths)[:-1])

    def generation(self) -> Generation:
        """All sequences, for training.

        Raises:
            TraceContentError: when a sequence has no sampled token yet.
        """
        return Generation(self.trace, self.prompt_lengths, self.logprobs_R)

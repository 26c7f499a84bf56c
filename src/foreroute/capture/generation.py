"""What a rollout engine hands to a trainer: tokens, routes, and the probabilities that the tokens were sampled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError
from foreroute.trace import RoutingTrace, concatenate
from foreroute.trace.check import as_sequence_numbers


@dataclass(frozen=True, eq=False)
class Generation:
    """S sampled sequences.

    Attributes:
        trace: tokens (prompt, then response) and routes of each sequence.
        prompt_lengths: int64 [S].
        logprobs_R: float32 [R], log-probability of each response token in the engine, sequence after sequence.
    """

    trace: RoutingTrace
    prompt_lengths: NDArray[np.int64]
    logprobs_R: NDArray[np.float32]

    def __post_init__(self) -> None:
        lengths = self.response_lengths
        if self.prompt_lengths.shape != (len(self.trace),) or (lengths < 1).any() or (self.prompt_lengths < 1).any():
            raise TraceContentError(
                f"{len(self.trace)} sequences of lengths {self.trace.lengths.tolist()[:8]} have prompts of lengths "
                f"{self.prompt_lengths.tolist()[:8]}; expected a prompt and a response of at least one token each"
            )
        if self.logprobs_R.shape != (int(lengths.sum()),):
            raise TraceContentError(
                f"got {self.logprobs_R.shape} log-probs for {int(lengths.sum())} response tokens; expected one each"
            )

    def __len__(self) -> int:
        """S, the number of sequences."""
        return len(self.trace)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """int64 [S], sampled tokens per sequence."""
        return self.trace.lengths - self.prompt_lengths

    def response(self, sequence: int) -> NDArray[np.int32]:
        """int32 [T], the sampled tokens of one sequence."""
        return self.trace.tokens(sequence)[int(self.prompt_lengths[sequence]) :]

    def select(self, sequences: ArrayLike) -> Generation:
        """The given sequences, in the given order."""
        chosen = as_sequence_numbers(sequences, len(self))
        parts = np.split(self.logprobs_R, np.cumsum(self.response_lengths)[:-1])
        logprobs = [parts[int(s)] for s in chosen]
        return Generation(
            self.trace.select(chosen),
            self.prompt_lengths[chosen],
            np.concatenate([*logprobs, np.zeros(0, np.float32)]),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Generation]) -> Generation:
        """All sequences of the parts, in order."""
        return cls(
            concatenate([part.trace for part in parts]),
            np.concatenate([part.prompt_lengths for part in parts]),
            np.concatenate([part.logprobs_R for part in parts]),
        )

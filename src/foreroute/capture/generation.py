"""What a rollout engine hands to a trainer: tokens, routes, and the probabilities that the tokens were sampled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError
from foreroute.trace import RoutingTrace, concatenate
from foreroute.trace.check import as_array, as_sequence_numbers


@dataclass(frozen=True, eq=False)
class Generation:
    """S sampled sequences.

        prompt  sampled … sampled  [tool … tool  sampled … sampled  …]

    A response is what was sampled. The text of tools between two turns of it has tokens and routes like the prompt, and
    neither log-probs nor a part in the loss.

    Attributes:
        trace: all tokens of each sequence, and their routes.
        prompt_lengths: int64 [S], tokens before the first sampled one.
        logprobs_R: float32 [R], log-probability of each sampled token in the engine, sequence after sequence.
        sampled_N: bool [N], which tokens of the trace were sampled. Without it, all behind the prompts.
    """

    trace: RoutingTrace
    prompt_lengths: NDArray[np.int64]
    logprobs_R: NDArray[np.float32]
    sampled_N: NDArray[np.bool_] = field(default=None)  # type: ignore[arg-type]  # filled in below

    def __post_init__(self) -> None:
        lengths = self.trace.lengths
        prompts = as_array(self.prompt_lengths, name="prompt_lengths")
        whole = prompts.shape == (len(self.trace),) and (prompts.dtype.kind in "iu" or not prompts.size)
        if not whole or (prompts < 1).any() or (prompts >= lengths).any():
            raise TraceContentError(
                f"{len(self.trace)} sequences of lengths {self.trace.lengths.tolist()[:8]} have prompts of lengths "
                f"{prompts.reshape(-1)[:8].tolist()}; expected whole numbers, a prompt and a response of at least one "
                "token each"
            )
        behind_prompts_N = _positions_N(lengths) >= np.repeat(prompts, lengths)
        if cast(Any, self.sampled_N) is None:
            object.__setattr__(self, "sampled_N", behind_prompts_N)
        else:
            self._check_sampled(behind_prompts_N)
        if self.logprobs_R.shape != (int(self.sampled_N.sum()),):
            raise TraceContentError(
                f"got {self.logprobs_R.shape} log-probs for {int(self.sampled_N.sum())} response tokens; expected one "
                "each"
            )

    def __len__(self) -> int:
        """S, the number of sequences."""
        return len(self.trace)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """int64 [S], sampled tokens per sequence."""
        return np.add.reduceat(self.sampled_N.astype(np.int64), self.trace.offsets[:-1])

    @property
    def targets_N(self) -> NDArray[np.bool_]:
        """Of all tokens but the last of each sequence, bool [N - S]: whether the one behind it was sampled."""
        is_first_N = np.zeros(len(self.sampled_N), np.bool_)
        is_first_N[self.trace.offsets[:-1]] = True
        return self.sampled_N[~is_first_N]

    def response(self, sequence: int) -> NDArray[np.int32]:
        """int32 [T], the sampled tokens of one sequence."""
        return self.trace.tokens(sequence)[self._sampled(sequence)]

    def last_turn(self, sequence: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Two arrays int32 [T]: what lies between the prompt and the last turn, and the last turn."""
        tokens = self.trace.tokens(sequence)
        start = int(np.flatnonzero(~self._sampled(sequence))[-1]) + 1
        return tokens[int(self.prompt_lengths[sequence]) : start], tokens[start:]

    def select(self, sequences: ArrayLike) -> Generation:
        """The given sequences, in the given order."""
        chosen = as_sequence_numbers(sequences, len(self))
        parts = np.split(self.logprobs_R, np.cumsum(self.response_lengths)[:-1])
        logprobs = [parts[int(s)] for s in chosen]
        return Generation(
            self.trace.select(chosen),
            self.prompt_lengths[chosen],
            np.concatenate([*logprobs, np.zeros(0, np.float32)]),
            np.concatenate([*[self._sampled(int(s)) for s in chosen], np.zeros(0, np.bool_)]),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Generation]) -> Generation:
        """All sequences of the parts, in order."""
        return cls(
            concatenate([part.trace for part in parts]),
            np.concatenate([part.prompt_lengths for part in parts]),
            np.concatenate([part.logprobs_R for part in parts]),
            np.concatenate([part.sampled_N for part in parts]),
        )

    def _sampled(self, sequence: int) -> NDArray[np.bool_]:
        """Of one sequence, bool [T]."""
        start, end = self.trace.offsets[sequence : sequence + 2]
        return self.sampled_N[int(start) : int(end)]

    def _check_sampled(self, behind_prompts_N: NDArray[np.bool_]) -> None:
        sampled_N = self.sampled_N
        if sampled_N.shape != behind_prompts_N.shape or sampled_N.dtype != np.bool_:
            raise TraceContentError(
                f"the sampled tokens are given as {sampled_N.dtype} of shape {sampled_N.shape}; expected bool "
                f"{behind_prompts_N.shape}, one for each token of the trace"
            )
        must_be_N = np.zeros_like(sampled_N)
        must_be_N[self.trace.offsets[:-1] + self.prompt_lengths] = True
        must_be_N[self.trace.offsets[1:] - 1] = True
        wrong = np.flatnonzero((sampled_N & ~behind_prompts_N) | (must_be_N & ~sampled_N))
        if len(wrong):
            sequence = int(np.searchsorted(self.trace.offsets, wrong[0], side="right")) - 1
            raise TraceContentError(
                f"token {int(wrong[0] - self.trace.offsets[sequence])} of sequence {sequence}, whose prompt has "
                f"{int(self.prompt_lengths[sequence])}, is {'' if sampled_N[wrong[0]] else 'not '}said to be sampled; "
                "expected that no token of a prompt is, and the first behind it and the last of a sequence are"
            )


def _positions_N(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [N], the position of each token in its sequence."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)

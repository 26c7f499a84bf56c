"""The rollout that a trainer is working on: its routes, and what they were captured from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import BatchMismatchError, ReplayError, StaleTraceError
from foreroute.trace import NO_VERSION, RoutingTrace, concatenate, extended

if TYPE_CHECKING:
    from foreroute.adapters.hf.trace_rows import TraceRows


@dataclass(frozen=True, eq=False)
class Rollout:
    """What one call of TRL's generation brought, in its order.

    Attributes:
        number: counts the rollouts of a trainer.
        trace: S sequences, prompt and completion.
        prompt_lengths: int64 [S].
        logprobs: S arrays float32 [R] (NaN where not known), what the tokens were sampled with; None without any.
        env_masks: S lists [R], 0 for what was not sampled, such as the answer of a tool; None where all was.
        ready: what was made of the routes of a part, by its sequences and lengths, for every pass over that part.
    """

    number: int
    trace: RoutingTrace
    prompt_lengths: NDArray[np.int64]
    logprobs: Sequence[NDArray[np.float32]] | None = None
    env_masks: Sequence[Sequence[int]] | None = None
    ready: dict[tuple[int, ...], TraceRows] = field(default_factory=dict)

    def with_logprobs(self, padded_SR: Tensor | None) -> Rollout:
        """With the log-probs that TRL keeps, padded on the right, if it keeps any."""
        if padded_SR is None:
            return self
        lengths = self.trace.lengths - self.prompt_lengths
        rows = padded_SR.float().cpu().numpy()
        return replace(self, logprobs=[row[:length] for row, length in zip(rows, lengths, strict=True)])

    def rows(self) -> Tensor:
        """int64 [S, 2], for TRL to shuffle and split: the number of the rollout, and that of the sequence."""
        return torch.tensor([[self.number, s] for s in range(len(self.trace))], dtype=torch.int64)

    def sequences_of(self, rows_B2: Tensor) -> NDArray[np.int64]:
        """int64 [B], the sequences of a micro-batch.

        Raises:
            ReplayError: when they are of another rollout.
        """
        numbers_B2 = rows_B2.cpu().numpy()
        if (numbers_B2[:, 0] != self.number).any():
            raise ReplayError(
                f"the micro-batch is of the rollouts {sorted(set(numbers_B2[:, 0].tolist()))}, and the routes at hand "
                f"are those of rollout {self.number}"
            )
        return np.asarray(numbers_B2[:, 1])

    def numbers(self, sequences: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """int64 [B], the sequences of a pass: all of them where it names none."""
        return np.arange(len(self.trace)) if sequences is None else sequences

    def sampled(self, sequences: NDArray[np.int64], width: int) -> NDArray[np.bool_]:
        """Bool [B, R], which tokens of the responses were sampled, padded on the right to a width."""
        if self.env_masks is None:
            return np.ones((len(sequences), width), np.bool_)
        sampled_BR = np.zeros((len(sequences), width), np.bool_)
        for row, s in enumerate(sequences):
            sampled_BR[row, : len(self.env_masks[s])] = self.env_masks[s]
        return sampled_BR

    def routes(
        self, sequences: NDArray[np.int64], length_B: NDArray[np.int64], *, drops_truncated: bool
    ) -> RoutingTrace:
        """The routes of a part of a batch.

        Args:
            sequences: int64 [B].
            length_B: tokens that the batch keeps of each.
            drops_truncated: whether TRL masks truncated completions; of such only the prompt is left.
        """
        trace, prompts = self.trace.select(sequences), self.prompt_lengths[sequences]
        masked = (length_B == prompts) & (length_B < trace.lengths)
        return trace.truncated(np.where(masked & drops_truncated, prompts, trace.lengths))


@dataclass(frozen=True, eq=False)
class Turn:
    """What one request to an engine brought: a whole rollout, or what is sampled behind the answers of tools.

    Attributes:
        prompt_lengths: of each of its sequences, tokens that the engine was given.
        trace: these, and those that were sampled.
        logprobs: of each, float32 [R], what its tokens were sampled with; None where the source has not seen them.
    """

    prompt_lengths: Sequence[int]
    trace: RoutingTrace
    logprobs: Sequence[NDArray[np.float32]] | None = None


Captured = tuple[RoutingTrace, Sequence[NDArray[np.float32]] | None]
"""Routes of a turn, and log-probs where the source has seen them."""


class TurnSource(Protocol):
    """Where a turn is sampled and its routes are captured: `generate`, vLLM, or an engine of foreroute."""

    def turn(
        self, sample: Callable[[], Any], prompts: Sequence[Sequence[int]], weight_version: int
    ) -> tuple[Any, Callable[[], Captured]]:
        """What TRL's `sample` returns, completions first; and what gives what was captured of them.

        The second raises CaptureError or ReplayError when there are no routes, or they cannot be true.
        """


def joined_turns(
    turns: Sequence[Turn], sequences: Sequence[NDArray[np.int32]], prompt_lengths: Sequence[int]
) -> tuple[RoutingTrace, list[NDArray[np.float32]] | None]:
    """Join the turns of a rollout: of a row that several of them routed, the first one's routes.

    What stands between two turns, such as the answer of a tool, and the last token of a turn are routed by the turn
    behind them, of which they are a part of the prompt.

    Args:
        turns: in order; each has some of the sequences, in their order.
        sequences: S arrays int32 [T], what is trained on.
        prompt_lengths: tokens of each before the first sampled one.

    Returns:
        The S sequences, and their log-probs [T - prompt], NaN where nothing was sampled; None where a turn has none.

    Raises:
        BatchMismatchError: when a turn is the beginning of none of the sequences, or they are of other tokens.
        ReplayError: when there was no turn.
    """
    if not turns:
        raise ReplayError(
            "TRL sampled a rollout past _generate_single_turn and rollout_func, so that its routes are unknown; return "
            "them from a rollout_func, or take replay='R2'"
        )
    traces = [RoutingTrace.unrouted(turns[0].trace.spec, [[]]) for _ in sequences]
    logprobs = [np.full(len(tokens), np.nan, np.float32) for tokens in sequences]
    for turn in turns:
        for number, s in enumerate(_sequences_of(turn, sequences)):
            traces[s] = extended(traces[s], turn.trace.select([number]))
            if turn.logprobs is not None:
                behind = logprobs[s][turn.prompt_lengths[number] :]
                behind[: len(turn.logprobs[number])] = turn.logprobs[number][: len(behind)]
    whole = concatenate(traces)
    lengths = np.array([len(tokens) for tokens in sequences])
    if len(short := np.flatnonzero(whole.lengths < lengths)):
        raise BatchMismatchError(
            f"TRL trains on {lengths[short[0]]} tokens of sequence {short[0]}, and the turns that were captured end at "
            f"{whole.lengths[short[0]]}: something between the engine and the trainer added tokens"
        )
    # TRL cuts the last turn of a sequence that is longer than max_completion_length
    trace = whole.truncated(lengths)
    if any(turn.logprobs is None for turn in turns):
        return trace, None
    return trace, [each[prompt:] for each, prompt in zip(logprobs, prompt_lengths, strict=True)]


def _sequences_of(turn: Turn, sequences: Sequence[NDArray[np.int32]]) -> Iterator[int]:
    """The numbers of the sequences that a turn went on with: those that hold its prompt, and what it sampled or a part.

    Equal turns of equal prompts are told apart by their order alone, which TRL keeps.
    """
    numbers = iter(range(len(sequences)))
    for place, prompt_length in enumerate(turn.prompt_lengths):
        tokens = turn.trace.tokens(place)
        for s in numbers:
            own = sequences[s]
            if len(own) >= prompt_length and np.array_equal(tokens[: len(own)], own[: len(tokens)]):
                yield s
                break
        else:
            raise BatchMismatchError(
                f"sequence {place} of a turn, {len(tokens)} tokens, is the beginning of none of the {len(sequences)} "
                "sequences that TRL trains on: something between the engine and the trainer reordered, cut or "
                "retokenised them"
            )


def joined_tokens(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[NDArray[np.int32]]:
    """S arrays int32 [T], prompt and completion."""
    return [np.array([*p, *c], np.int32) for p, c in zip(prompts, completions, strict=True)]


def require_lengths(env_masks: Sequence[Sequence[int]] | None, completions: Sequence[Sequence[int]]) -> None:
    """Raise `BatchMismatchError` unless each `env_mask` of a `rollout_func` is as long as its completion."""
    found, expected = (None if given is None else [len(each) for each in given] for given in (env_masks, completions))
    if found is not None and found != expected:
        raise BatchMismatchError(
            f"the rollout_func returned env_mask of the lengths {found} for completions of {expected}; return one "
            "number for each token, 1 where it was sampled"
        )


def require_version(trace: RoutingTrace, weight_version: int) -> None:
    """Raise `StaleTraceError` when routes say that they are of other weights than the rollout's."""
    others = sorted(set(trace.versions) - {NO_VERSION, weight_version})
    if others:
        raise StaleTraceError(
            f"routes of weight versions {others} came with the rollout of step {weight_version}; return those of the "
            "weights that sampled the tokens, or state no version"
        )

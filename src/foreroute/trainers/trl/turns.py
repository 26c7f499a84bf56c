"""Turns: what each request to an engine brought, joined to the sequences of a rollout that TRL trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.trace import RoutingTrace, concatenate, extended

Captured = tuple[RoutingTrace, Sequence[NDArray[np.float32]] | None]
"""Routes of a turn, and log-probs where the source has seen them."""


class Turn(NamedTuple):
    """What one request to an engine brought: a whole rollout, or what is sampled behind the answers of tools."""

    prompt_lengths: Sequence[int]  # of each of its sequences, tokens that the engine was given
    trace: RoutingTrace  # of these tokens, and of those that were sampled
    logprobs: Sequence[NDArray[np.float32]] | None = None  # of each, [R]; None where the source has not seen them


class TurnSource(Protocol):
    """Where a turn is sampled and its routes are captured: `generate`, vLLM, or an engine of foreroute."""

    def turn(
        self, sample: Callable[[], Any], prompts: Sequence[Sequence[int]], weight_version: int
    ) -> tuple[Any, Callable[[], Captured]]:
        """Give what TRL's `sample` returns, completions first; and a function that reads what was captured of them.

        It raises CaptureError or ReplayError when there are no routes, or they cannot be true.
        """
        # read later, as under "none" TRL trains on what was sampled whatever is wrong with its routes


def join_turns(
    turns: Sequence[Turn], sequences: Sequence[NDArray[np.int32]], prompt_lengths: Sequence[int]
) -> tuple[RoutingTrace, list[NDArray[np.float32]] | None]:
    """Join the turns of a rollout to its S sequences [T]: of a row that several of them routed, the first one's routes.

    What stands between two turns, such as the answer of a tool, and the last token of a turn are routed by the turn
    behind them, of which they are a part of the prompt. Log-probs [T - prompt] are NaN where nothing was sampled, and
    None where a turn has none.
    """
    if not turns:
        raise ReplayError(
            "TRL sampled a rollout past _generate_single_turn and rollout_func, so that its routes are unknown; return "
            "them from a rollout_func, or take replay='R2'"
        )
    traces = [RoutingTrace.unrouted(turns[0].trace.spec, [[]]) for _ in sequences]
    logprobs = [np.full(len(tokens), np.nan, np.float32) for tokens in sequences]
    for turn in turns:
        for number, s in enumerate(_match_sequences(turn, sequences)):
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


def join_tokens(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[NDArray[np.int32]]:
    """Give S arrays int32 [T], prompt and completion."""
    return [np.array([*p, *c], np.int32) for p, c in zip(prompts, completions, strict=True)]


def _match_sequences(turn: Turn, sequences: Sequence[NDArray[np.int32]]) -> Iterator[int]:
    """Yield the numbers of the sequences that a turn went on with, which hold its prompt and some of its samples."""
    # equal turns of equal prompts are told apart by their order alone, which TRL keeps: no number comes twice
    numbers = iter(range(len(sequences)))
    for own, prompt_length in enumerate(turn.prompt_lengths):
        tokens = turn.trace.tokens(own)
        for s in numbers:
            trained = sequences[s]
            if len(trained) >= prompt_length and np.array_equal(tokens[: len(trained)], trained[: len(tokens)]):
                yield s
                break
        else:
            raise BatchMismatchError(
                f"sequence {own} of a turn, {len(tokens)} tokens, is the beginning of none of the {len(sequences)} "
                "sequences that TRL trains on: something between the engine and the trainer reordered, cut or "
                "retokenised them"
            )

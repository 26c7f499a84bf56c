"""Which rank executes which sequence in which micro-step: packed under a token budget, or padded to batches."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import ConfigError, CountsError, LayoutError
from foreroute.layout.slots import as_lengths, check_count
from foreroute.trace.checks import as_offsets

WINDOW = 64
"""Sequences that change places are at most so many apart when sorted by cost: of about the same length. On workload G8
(4 layers, 16 micro-steps) 6.9 % of the assignments are surplus before the exchange and 6.2 % after it, with any window
from 16 to 256 and from 25 to 200 proposals per sequence."""
PROPOSALS_PER_SEQUENCE = 50
"""Pairs that are looked at, by sequences. The time of packing grows with it; `WINDOW` says which numbers were tried."""


@dataclass(frozen=True, eq=False)
class Packing:
    """The place of each of S sequences.

    Attributes:
        micro_step_S: int32 [S], from 0.
        rank_S: int32 [S], the source rank, from 0.
        num_micro_steps: M. A micro-step may be empty, and a rank in it.
        num_ranks: G.
    """

    micro_step_S: NDArray[np.int32]
    rank_S: NDArray[np.int32]
    num_micro_steps: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.micro_step_S.shape != self.rank_S.shape or self.micro_step_S.ndim != 1:
            raise LayoutError(
                f"got micro-steps of shape {self.micro_step_S.shape} and ranks of shape {self.rank_S.shape}; "
                "expected one of each for every sequence"
            )
        if self.num_micro_steps < 1 or self.num_ranks < 1:
            raise LayoutError(
                f"got {self.num_micro_steps} micro-steps on {self.num_ranks} ranks; expected at least one of each"
            )

    def sequences(self, micro_step: int, rank: int) -> NDArray[np.int64]:
        """The sequences that a rank executes in a micro-step, int64, ascending."""
        return np.flatnonzero((self.micro_step_S == micro_step) & (self.rank_S == rank))


def pack_sequences(
    lengths: ArrayLike,
    num_ranks: int,
    token_budget: int,
    *,
    num_micro_steps: int | None = None,
    token_cost: float = 1.0,
    square_cost: float = 0.0,
    counts_SLE: ArrayLike | None = None,
    home_LE: ArrayLike | None = None,
    seed: int = 0,
) -> Packing:
    """Deal whole sequences to ranks and micro-steps, so that the ranks of a micro-step take equally long.

    A sequence of n tokens costs `token_cost` * n + `square_cost` * n**2 outside the experts: projections and the
    attention core. The dearest sequence goes first, each to the cheapest of all M * G places that has room; places are
    numbered by micro-step, so that the longest sequences meet in the same ones.

    With routes in view, sequences of about the same length then change places between micro-steps, where that brings
    the load of the experts' home ranks nearer to the mean in each. No place gets dearer or longer by it than the
    dearest and the longest of its micro-step before.

    Args:
        lengths: integers [S], tokens of each sequence.
        num_ranks: G; 1 for the micro-batches of one rank.
        token_budget: most tokens of a rank in a micro-step.
        num_micro_steps: M. Left out, so many that dealing with one fewer leaves a sequence without room.
        token_cost: see above; units do not matter.
        square_cost: see above. 8192 / 37.7e6 of `token_cost` by FLOPs for Qwen3-30B-A3B, more as its kernel is slower.
        counts_SLE: integers [S, L, E], assignments of each sequence, from `packed_counts` with a micro-step of its own
            for each. Some of the layers will do.
        home_LE: integers [L, E], the rank that each expert lives on; goes with `counts_SLE`.
        seed: of the exchange. The same seed gives the same packing.

    Raises:
        LayoutError: when the budget is impossible, or sequences do not fit into `num_micro_steps`.
        CountsError: when counts and homes do not fit each other, the sequences or the ranks.
        ConfigError: for negative costs or seeds.
    """
    tokens_S = _lengths_within(lengths, token_budget)
    check_count("the number of ranks", num_ranks)
    if not len(tokens_S):
        raise LayoutError("there is no sequence to pack; expected at least one")
    if min(token_cost, square_cost) < 0 or seed < 0:
        raise ConfigError(f"costs are {token_cost} and {square_cost}, the seed is {seed}; expected 0 or more")
    cost_S = token_cost * tokens_S + square_cost * tokens_S.astype(np.float64) ** 2
    place_S, micro_steps = _deal(tokens_S, cost_S, num_ranks, token_budget, num_micro_steps)
    if (counts_SLE is None) != (home_LE is None):
        raise CountsError("counts of sequences and homes of experts go together; pass both or none")
    if counts_SLE is not None and home_LE is not None:
        _exchange(tokens_S, cost_S, (counts_SLE, home_LE), place_S, (micro_steps, num_ranks), seed)
    micro_step_S, rank_S = np.divmod(place_S, num_ranks)
    return Packing(micro_step_S.astype(np.int32), rank_S.astype(np.int32), micro_steps, num_ranks)


def padded_batches(lengths: ArrayLike, token_budget: int, *, min_count: int = 0) -> list[NDArray[np.int64]]:
    """Cut sequences, in their order, into micro-batches of at most `token_budget` tokens, padding included.

    A padded batch [B, T] takes B times its longest sequence. Sequences sorted by length make batches with little
    padding; `pack_sequences` is for rows without padding.

    Args:
        lengths: integers [S], tokens per sequence.
        token_budget: most B times T of a micro-batch.
        min_count: make at least as many micro-batches: data-parallel ranks must agree on the number, or they hang.

    Returns:
        The sequences of each micro-batch, int64, ascending; none is empty.

    Raises:
        LayoutError: when a sequence alone exceeds the budget, or there are fewer sequences than `min_count`.
    """
    tokens_S = _lengths_within(lengths, token_budget)
    if min_count > len(tokens_S):
        raise LayoutError(f"{len(tokens_S)} sequences cannot make {min_count} micro-batches; lower min_count")
    if not len(tokens_S):
        return []
    bounds, longest = [0], 0
    for sequence, tokens in enumerate(tokens_S.tolist()):
        longest = max(longest, tokens)
        if (sequence + 1 - bounds[-1]) * longest > token_budget:
            bounds.append(sequence)
            longest = tokens
    bounds.append(len(tokens_S))
    while len(bounds) - 1 < min_count:
        bounds = _halve_heaviest(bounds, as_offsets(tokens_S))
    return np.split(np.arange(len(tokens_S)), bounds[1:-1])


def _lengths_within(lengths: ArrayLike, token_budget: int) -> NDArray[np.int64]:
    tokens_S = as_lengths(lengths, "lengths")
    check_count("the token budget", token_budget, least=0)
    longest = int(tokens_S.max(initial=0))
    if longest > token_budget:
        raise LayoutError(
            f"sequence {int(tokens_S.argmax())} has {longest} tokens and the token budget is {token_budget}; "
            f"raise the budget to at least {longest}, or cut the sequence"
        )
    return tokens_S


def _halve_heaviest(bounds: list[int], sums: NDArray[np.int64]) -> list[int]:
    """Cut the heaviest micro-batch of several sequences as near to its middle as they allow."""
    edges = np.array(bounds)
    weight = np.where(np.diff(edges) > 1, np.diff(sums[edges]), -1)
    m = int(weight.argmax())
    inner = np.arange(bounds[m] + 1, bounds[m + 1])
    middle = (sums[bounds[m]] + sums[bounds[m + 1]]) / 2
    return sorted([*bounds, int(inner[np.abs(sums[inner] - middle).argmin()])])


def _deal(
    tokens_S: NDArray[np.int64],
    cost_S: NDArray[np.float64],
    num_ranks: int,
    token_budget: int,
    num_micro_steps: int | None,
) -> tuple[NDArray[np.int64], int]:
    """The place of each sequence, micro-step * G + rank, and the number of micro-steps."""
    longest_first = np.argsort(-tokens_S, kind="stable")  # which is the dearest first
    tokens, costs = tokens_S[longest_first].tolist(), cost_S[longest_first].tolist()

    @cache  # the number that is found was tried before
    def dealt(micro_steps: int) -> list[int] | None:
        for weights in (costs, tokens):  # by tokens more fit into tight budgets
            places = _to_lightest(tokens, weights, token_budget, micro_steps * num_ranks)
            if places is not None:
                return places
        return None

    if num_micro_steps is None:
        # no packing has fewer micro-steps: all tokens have to fit, and two sequences above half the budget never do
        alone = int((2 * tokens_S > token_budget).sum())
        fewest = max(1, -(-sum(tokens) // max(1, num_ranks * token_budget)), -(-alone // num_ranks))
        num_micro_steps = _first_that_works(fewest, dealt)
    check_count("the number of micro-steps", num_micro_steps)
    places = dealt(num_micro_steps)
    if places is None:
        raise LayoutError(
            f"{len(tokens)} sequences of {sum(tokens)} tokens found no room in {num_micro_steps} micro-steps of "
            f"{num_ranks} ranks with {token_budget} tokens each; allow more micro-steps or tokens"
        )
    place_S = np.empty(len(tokens), np.int64)
    place_S[longest_first] = places
    return place_S, num_micro_steps


def _first_that_works(least: int, attempt: Callable[[int], list[int] | None]) -> int:
    """The first number from `least` on with which an attempt works.

    An attempt takes as long as dealing once, and what works once mostly works with every larger number. So distances
    are doubled up to a number that works, then halved: attempts are few, and the one before the result fails.
    """
    most, step = least, 1
    while attempt(most) is None:
        least, most, step = most + 1, most + step, 2 * step
    while least < most:
        middle = (least + most) // 2
        least, most = (middle + 1, most) if attempt(middle) is None else (least, middle)
    return most


def _to_lightest(tokens: list[int], weights: list[Any], token_budget: int, places: int) -> list[int] | None:
    """Give each sequence in turn to the place with the least weight that has room; ties go to the first place.

    Args:
        tokens: of each sequence, descending: where one found no room, only a later and shorter one can.
        weights: of each sequence.
        token_budget: most tokens of a place.
        places: how many there are.

    Returns:
        The place of each sequence; None when one has room nowhere.
    """
    held = [0] * places
    chosen: list[int] = []
    opened = 0  # places from here on are empty
    lightest: list[tuple[float, int]] = []  # a heap by weight; those that may have room
    full: list[tuple[int, float, int]] = []  # a heap by tokens held; none had room for the sequence before
    for count, weight in zip(tokens, weights, strict=True):
        while full and full[0][0] + count <= token_budget:
            _, filled, place = heapq.heappop(full)
            heapq.heappush(lightest, (filled, place))
        while lightest and held[lightest[0][1]] + count > token_budget:
            filled, place = heapq.heappop(lightest)
            heapq.heappush(full, (held[place], filled, place))
        if opened < places and (not lightest or (0.0, opened) < lightest[0]):
            filled, place, opened = 0.0, opened, opened + 1
        elif lightest:
            filled, place = heapq.heappop(lightest)
        else:
            return None
        heapq.heappush(lightest, (filled + weight, place))
        held[place] += count
        chosen.append(place)
    return chosen


def _exchange(
    tokens_S: NDArray[np.int64],
    cost_S: NDArray[np.float64],
    routes: tuple[ArrayLike, ArrayLike],
    place_S: NDArray[np.int64],
    shape: tuple[int, int],
    seed: int,
) -> None:
    """Change `place_S` by the routes: counts [S, L, E] and homes [L, E]; `shape` is M, G."""
    from foreroute.layout.packing_kernels import exchange

    counts, homes = (np.asarray(each) for each in routes)
    num_ranks = shape[1]
    if counts.ndim != 3 or len(counts) != len(tokens_S) or homes.shape != counts.shape[1:]:
        raise CountsError(
            f"got counts of shape {counts.shape} and homes of shape {homes.shape} for {len(tokens_S)} sequences; "
            "expected [sequences, layers, experts] and [layers, experts]"
        )
    if counts.dtype.kind not in "iu" or homes.dtype.kind not in "iu" or counts.min(initial=0) < 0:
        raise CountsError(f"got counts of dtype {counts.dtype} and homes of {homes.dtype}; expected integers from 0")
    if homes.min(initial=0) < 0 or homes.max(initial=0) >= num_ranks:
        raise CountsError(f"an expert lives on no rank from 0 to {num_ranks - 1}")
    if len(tokens_S) < 2:
        return
    is_home_LEG = (homes[..., None] == np.arange(num_ranks)).astype(np.float64)
    sent_SLG = np.matmul(counts.swapaxes(0, 1).astype(np.float64), is_home_LEG).swapaxes(0, 1).astype(np.int64)
    even_SL1 = (sent_SLG.sum(axis=-1, keepdims=True) + num_ranks // 2) // num_ranks
    apart_SLG = np.ascontiguousarray(sent_SLG - even_SL1, np.int32)
    held_B, filled_B = (np.bincount(place_S, each, shape[0] * num_ranks) for each in (tokens_S, cost_S))
    sizes = (tokens_S, cost_S, held_B.astype(np.int64), filled_B)
    limits = (sizes[2].reshape(shape).max(axis=1), filled_B.reshape(shape).max(axis=1))
    dearest = np.argsort(-cost_S, kind="stable")
    word = np.random.default_rng(seed).integers(0, 2**64, dtype=np.uint64)
    exchange(apart_SLG, dearest, WINDOW, sizes, limits, PROPOSALS_PER_SEQUENCE * len(tokens_S), word, place_S)

"""Level (a) of the planner: which rank executes which sequence in which micro-step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import ConfigError, CountsError, LayoutError
from foreroute.plan.counts import Packing

WINDOW = 64
"""Sequences that change places are at most so many apart when sorted by cost: of about the same length. On workload G8
(4 layers, 16 micro-steps) 6.9 % of the assignments are surplus before the exchange and 6.2 % after it, with any window
from 16 to 256 and from 25 to 200 proposals per sequence."""
PROPOSALS_PER_SEQUENCE = 50
"""Pairs that are looked at, by sequences. The time of packing grows with it. Chosen by hand, as said of `WINDOW`."""


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
        num_ranks: G.
        token_budget: most tokens of a rank in a micro-step.
        num_micro_steps: M; the least that suffices when left out.
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
    tokens_S = _checked_lengths(lengths, num_ranks, token_budget, num_micro_steps)
    if min(token_cost, square_cost) < 0 or seed < 0:
        raise ConfigError(f"costs are {token_cost} and {square_cost}, the seed is {seed}; expected 0 or more")
    weight_S = token_cost * tokens_S + square_cost * tokens_S.astype(np.float64) ** 2
    bin_S, bins = _deal(tokens_S, weight_S, num_ranks, token_budget, num_micro_steps)
    if (counts_SLE is None) != (home_LE is None):
        raise CountsError("counts of sequences and homes of experts go together; pass both or none")
    if counts_SLE is not None and home_LE is not None:
        counts, homes = _checked_routes(counts_SLE, home_LE, len(tokens_S), num_ranks)
        _exchange(tokens_S, weight_S, counts, homes, bin_S, bins, num_ranks, seed)
    return Packing(
        (bin_S // num_ranks).astype(np.int32), (bin_S % num_ranks).astype(np.int32), bins // num_ranks, num_ranks
    )


def _checked_lengths(
    lengths: ArrayLike, num_ranks: int, token_budget: int, num_micro_steps: int | None
) -> NDArray[np.int64]:
    given: NDArray[Any] = np.asarray(lengths)
    if given.ndim != 1 or not given.size or given.dtype.kind not in "iu" or given.min() < 0:
        raise LayoutError(
            f"got lengths of dtype {given.dtype} and shape {given.shape}; expected a whole number from 0 per sequence"
        )
    if num_ranks < 1 or (num_micro_steps is not None and num_micro_steps < 1):
        raise LayoutError(f"got {num_micro_steps} micro-steps on {num_ranks} ranks; expected at least one of each")
    if given.max() > token_budget:
        s = int(given.argmax())
        raise LayoutError(
            f"sequence {s} has {int(given[s])} tokens and a rank may hold {token_budget} in a micro-step; "
            f"raise the budget to at least {int(given[s])}, or cut the sequence"
        )
    return given.astype(np.int64)


def _deal(
    tokens_S: NDArray[np.int64],
    weight_S: NDArray[np.float64],
    num_ranks: int,
    token_budget: int,
    num_micro_steps: int | None,
) -> tuple[NDArray[np.int64], int]:
    """The place of each sequence, micro-step * G + rank, and how many places there are."""
    from foreroute.planner.packing_kernels import deal

    dearest = np.argsort(-weight_S, kind="stable")
    bin_S = np.empty(len(tokens_S), np.int64)
    fewest = max(1, -(-int(tokens_S.sum()) // max(1, num_ranks * token_budget)))
    tried = range(fewest, len(tokens_S) + 1) if num_micro_steps is None else (num_micro_steps,)
    # Fewer micro-steps than `fewest` cannot hold the tokens; dealing greedily may need more.
    for micro_steps in tried:
        held_B, filled_B = np.empty(micro_steps * num_ranks, np.int64), np.empty(micro_steps * num_ranks, np.float64)
        for weights in (weight_S, tokens_S.astype(np.float64)):  # by tokens more fit into tight budgets
            if deal(dearest, tokens_S, weights, token_budget, held_B, filled_B, bin_S):
                return bin_S, micro_steps * num_ranks
    raise LayoutError(
        f"{len(tokens_S)} sequences of {int(tokens_S.sum())} tokens found no room in {num_micro_steps} micro-steps of "
        f"{num_ranks} ranks with {token_budget} tokens each; allow more micro-steps or tokens"
    )


def _checked_routes(
    counts_SLE: ArrayLike, home_LE: ArrayLike, num_sequences: int, num_ranks: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    counts: NDArray[Any] = np.asarray(counts_SLE)
    homes: NDArray[Any] = np.asarray(home_LE)
    if counts.ndim != 3 or len(counts) != num_sequences or homes.shape != counts.shape[1:]:
        raise CountsError(
            f"got counts of shape {counts.shape} and homes of shape {homes.shape} for {num_sequences} sequences; "
            "expected [sequences, layers, experts] and [layers, experts]"
        )
    if counts.dtype.kind not in "iu" or homes.dtype.kind not in "iu" or counts.min(initial=0) < 0:
        raise CountsError(f"got counts of dtype {counts.dtype} and homes of {homes.dtype}; expected integers from 0")
    if homes.min(initial=0) < 0 or homes.max(initial=0) >= num_ranks:
        raise CountsError(f"an expert lives on no rank from 0 to {num_ranks - 1}")
    return np.ascontiguousarray(counts, np.int32), np.ascontiguousarray(homes, np.int64)


def _exchange(
    tokens_S: NDArray[np.int64],
    weight_S: NDArray[np.float64],
    counts_SLE: NDArray[np.int32],
    home_LE: NDArray[np.int64],
    bin_S: NDArray[np.int64],
    bins: int,
    num_ranks: int,
    seed: int,
) -> None:
    """Change `bin_S`."""
    from foreroute.planner.packing_kernels import exchange, rank_surplus

    if len(tokens_S) < 2:
        return
    apart_SLG = np.empty((*counts_SLE.shape[:2], num_ranks), np.int32)
    rank_surplus(counts_SLE, home_LE, apart_SLG)
    held_B = np.bincount(bin_S, tokens_S, bins).astype(np.int64)
    filled_B = np.bincount(bin_S, weight_S, bins)
    limits = (held_B.reshape(-1, num_ranks).max(axis=1), filled_B.reshape(-1, num_ranks).max(axis=1))
    dearest = np.argsort(-weight_S, kind="stable")
    stream = np.random.default_rng(seed).integers(0, 2**64, dtype=np.uint64)
    sizes = (tokens_S, weight_S, held_B, filled_B)
    exchange(apart_SLG, dearest, WINDOW, sizes, limits, PROPOSALS_PER_SEQUENCE * len(tokens_S), stream, bin_S)

"""The inner loops of packing. Compiled; loaded on first use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import kernel, next_below

ZERO = np.int32(0)
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Loads = NDArray[np.int32]


@kernel
def deal(
    order: Ints, tokens_S: Ints, weight_S: Floats, budget: int, held_B: Ints, filled_B: Floats, bin_S: Ints
) -> bool:
    """Give each sequence in turn to the bin with the least weight that has room; ties go to the first bin.

    Args:
        order: int64 [S], sequence numbers.
        tokens_S: int64 [S].
        weight_S: float64 [S].
        budget: most tokens of a bin.
        held_B: int64 [B], written: tokens of each bin.
        filled_B: float64 [B], written: its weight.
        bin_S: int64 [S], written.

    Returns:
        Whether all found room.
    """
    for b in range(len(held_B)):
        held_B[b], filled_B[b] = 0, 0.0
    # Invariant: no bin holds more than `budget` tokens.
    for s in order:
        best = -1
        for b in range(len(held_B)):
            if held_B[b] + tokens_S[s] <= budget and (best < 0 or filled_B[b] < filled_B[best]):
                best = b
        if best < 0:
            return False
        bin_S[s] = best
        held_B[best] += tokens_S[s]
        filled_B[best] += weight_S[s]
    return True


@kernel
def rank_surplus(counts_SLE: Loads, home_LE: Ints, apart_SLG: Loads) -> None:
    """What each sequence sends to each home rank beyond an even share, rounded. int32 [S, L, G], written."""
    num_ranks = apart_SLG.shape[2]
    for s in range(counts_SLE.shape[0]):
        for layer in range(counts_SLE.shape[1]):
            apart_G, total = apart_SLG[s, layer], 0
            for g in range(num_ranks):
                apart_G[g] = 0
            for e in range(counts_SLE.shape[2]):
                apart_G[home_LE[layer, e]] += counts_SLE[s, layer, e]
                total += counts_SLE[s, layer, e]
            share = np.int32((total + num_ranks // 2) // num_ranks)
            for g in range(num_ranks):
                apart_G[g] -= share


@kernel
def exchange(
    apart_SLG: Loads,
    order: Ints,
    window: int,
    sizes: tuple[Ints, Floats, Ints, Floats],
    limits: tuple[Ints, Floats],
    proposals: int,
    seed: np.uint64,
    bin_S: Ints,
) -> None:
    """Swap sequences of different micro-steps where that lowers what ranks have above the mean, all layers together.

    Args:
        apart_SLG: int32 [S, L, G], from `rank_surplus`.
        order: int64 [S], sequences by weight; partners are at most `window` places apart in it.
        window: see `order`.
        sizes: tokens int64 [S] and weight float64 [S] of each sequence, tokens int64 [B] and weight float64 [B] of each
            bin; those of bins are kept up to date.
        limits: most tokens int64 [M] and weight float64 [M] of a bin in each micro-step; no swap exceeds them.
        proposals: how many pairs to look at.
        seed: uint64.
        bin_S: int64 [S], micro-step * G + rank, changed.
    """
    tokens_S, weight_S, held_B, filled_B = sizes
    most_tokens_M, most_weight_M = limits
    num_ranks = apart_SLG.shape[2]
    stream = np.full(1, seed, np.uint64)
    apart_MLG = np.zeros((len(most_tokens_M), apart_SLG.shape[1], num_ranks), np.int32)
    for s in range(len(bin_S)):
        _add(apart_SLG[s], apart_MLG[bin_S[s] // num_ranks])
    # Invariant: apart_MLG adds up apart_SLG over the sequences of each micro-step, held_B and filled_B tokens and
    # weights over those of each bin, and no bin is above the limits of its micro-step. Every swap lowers the objective.
    for _ in range(proposals):
        i = next_below(stream, len(order) - 1)
        j = min(i + 1 + next_below(stream, window), len(order) - 1)
        s, t = order[i], order[j]
        a, b = bin_S[s], bin_S[t]
        m, n = a // num_ranks, b // num_ranks
        more, heavier = tokens_S[t] - tokens_S[s], weight_S[t] - weight_S[s]
        if (
            m != n
            and held_B[a] + more <= most_tokens_M[m]
            and held_B[b] - more <= most_tokens_M[n]
            and filled_B[a] + heavier <= most_weight_M[m]
            and filled_B[b] - heavier <= most_weight_M[n]
            and _change(apart_SLG[s], apart_SLG[t], apart_MLG[m], apart_MLG[n]) < 0
        ):
            _move(apart_SLG[s], apart_SLG[t], apart_MLG[m], apart_MLG[n])
            bin_S[s], bin_S[t] = b, a
            held_B[a] += more
            held_B[b] -= more
            filled_B[a] += heavier
            filled_B[b] -= heavier


@kernel
def _add(from_LG: Loads, to_LG: Loads) -> None:
    for layer in range(from_LG.shape[0]):
        for g in range(from_LG.shape[1]):
            to_LG[layer, g] += from_LG[layer, g]


@kernel
def _change(s_LG: Loads, t_LG: Loads, m_LG: Loads, n_LG: Loads) -> int:
    """Change of the sum of what is above 0, when s leaves m for n and t leaves n for m."""
    total = np.int64(0)
    for layer in range(s_LG.shape[0]):
        # int32 within a layer, so that ranks are taken in vectors; int64 across layers.
        part = ZERO
        for g in range(s_LG.shape[1]):
            gained, m, n = t_LG[layer, g] - s_LG[layer, g], m_LG[layer, g], n_LG[layer, g]
            part += max(m + gained, ZERO) + max(n - gained, ZERO) - max(m, ZERO) - max(n, ZERO)
        total += part
    return int(total)


@kernel
def _move(s_LG: Loads, t_LG: Loads, m_LG: Loads, n_LG: Loads) -> None:
    for layer in range(s_LG.shape[0]):
        for g in range(s_LG.shape[1]):
            gained = t_LG[layer, g] - s_LG[layer, g]
            m_LG[layer, g] += gained
            n_LG[layer, g] -= gained

"""The exchange of sequences by their routes. Compiled; loaded on first use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import kernel, next_below

ZERO = np.int32(0)
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Loads = NDArray[np.int32]


@kernel
def exchange(
    apart_SLG: Loads,
    order: Ints,
    window: int,
    sizes: tuple[Ints, Floats, Ints, Floats],
    limits: tuple[Ints, Floats],
    proposals: int,
    seed: np.uint64,
    place_S: Ints,
) -> None:
    """Swap sequences of different micro-steps where that lowers what ranks have above the mean, all layers together.

    Args:
        apart_SLG: int32 [S, L, G], what each sequence sends to each home rank beyond an even share.
        order: int64 [S], sequences by weight; partners are at most `window` places apart in it.
        window: see `order`.
        sizes: tokens int64 [S] and weight float64 [S] of each sequence, tokens int64 [B] and weight float64 [B] of each
            of B places; those of places are kept up to date.
        limits: most tokens int64 [M] and weight float64 [M] of a place in each micro-step; no swap exceeds them.
        proposals: how many pairs to look at.
        seed: uint64.
        place_S: int64 [S], micro-step * G + rank, changed.
    """
    tokens_S, weight_S, held_B, filled_B = sizes
    most_tokens_M, most_weight_M = limits
    num_ranks = apart_SLG.shape[2]
    rng_state = np.full(1, seed, np.uint64)
    apart_MLG = np.zeros((len(most_tokens_M), apart_SLG.shape[1], num_ranks), np.int32)
    for s in range(len(place_S)):
        apart_MLG[place_S[s] // num_ranks] += apart_SLG[s]
    # Invariant: apart_MLG adds up apart_SLG over the sequences of each micro-step, held_B and filled_B tokens and
    # weights over those of each place, and no place is above the limits of its micro-step. Every swap lowers the sum
    # of what is above 0 in apart_MLG.
    for _ in range(proposals):
        i = next_below(rng_state, len(order) - 1)
        j = min(i + 1 + next_below(rng_state, window), len(order) - 1)
        s, t = order[i], order[j]
        a, b = place_S[s], place_S[t]
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
            apart_MLG[m] += apart_SLG[t] - apart_SLG[s]
            apart_MLG[n] -= apart_SLG[t] - apart_SLG[s]
            place_S[s], place_S[t] = b, a
            held_B[a] += more
            held_B[b] -= more
            filled_B[a] += heavier
            filled_B[b] -= heavier


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

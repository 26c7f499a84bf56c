"""The inner loops of the workload generator. Compiled; loaded on first use.

A cell has a stream of random words of its own, so that it is the same drawn alone or in a step.
`rule` is (top_k, prompt_draws, response_draws, common) of the `Workload`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from foreroute.kernels import LOW_32, SHIFT_32, TO_UNIT, kernel, next_unit, next_word


@kernel
def draw_sequences(seed: Any, share_E: Any, prompt_S: Any, rows_S: Any, rule: Any, counts_SE: Any) -> None:
    """Assignments of every sequence of one cell.

    Args:
        seed: uint64, of this cell.
        share_E: float64 [E], the share of each expert in this micro-step; adds up to 1.
        prompt_S: int32 [S], ascending from 0.
        rows_S: int32 [S], routed tokens.
        rule: as above.
        counts_SE: int32 [S, E], written; row s adds up to `rows_S[s] * top_k`, and no entry exceeds `rows_S[s]`.
    """
    top_k, prompt_draws, response_draws, common = rule
    state = np.full(1, seed, np.uint64)
    upto_E = np.cumsum(share_E)
    topic = np.empty(prompt_draws, np.int32)
    weight_E = np.empty(len(share_E), np.float64)
    prompt = -1
    for s in range(len(rows_S)):
        if prompt_S[s] != prompt:
            prompt = prompt_S[s]
            for i in range(prompt_draws):
                unit = next_unit(state)
                topic[i] = min(np.searchsorted(upto_E, unit, side="right"), len(upto_E) - 1)
        # Draws weigh 1 on average, so this much for the micro-step's shares makes them the part `common` of the sum.
        scale = common / (1.0 - common) * response_draws
        for e in range(len(share_E)):
            weight_E[e] = scale * share_E[e]
        for _ in range(response_draws):
            word = next_word(state)
            # The high half of a word picks an expert of the prompt, the low half gives its weight, 0.5 to 1.5.
            pick = ((word >> SHIFT_32) * uint64(prompt_draws)) >> SHIFT_32
            weight_E[topic[pick]] += 0.5 + (word & LOW_32) * TO_UNIT
        _round(weight_E, rows_S[s], top_k, next_unit(state), counts_SE[s])


@kernel
def _round(weight_E: Any, rows: Any, top_k: Any, phase: Any, counts_E: Any) -> None:
    """Turn weights into whole counts that add up to rows * top_k, none above rows: cap, then round systematically."""
    free, left = 0.0, float(rows * top_k)
    for e in range(len(weight_E)):
        free += weight_E[e]
    # capping an expert leaves more to the others, which may then have to be capped; -1 marks those that are
    capped = True
    while capped:
        capped = False
        scale = left / free if free > 0 else 0.0
        for e in range(len(weight_E)):
            if weight_E[e] >= 0 and weight_E[e] * scale > rows:
                free -= weight_E[e]
                left -= rows
                weight_E[e] = -1.0
                capped = True
    # systematic rounding: counts are the steps of floor(phase + running sum), so each is its weight rounded up or down
    done, upto = 0, 0.0
    last = -1
    for e in range(len(weight_E)):
        if weight_E[e] < 0:
            counts_E[e] = rows
            continue
        upto += weight_E[e] * scale
        reached = int(np.floor(upto + phase))
        counts_E[e] = min(max(reached - done, 0), rows)
        done += counts_E[e]
        if counts_E[e] < rows:
            last = e
    _settle(round(left) - done, rows, last, counts_E)


@kernel
def _settle(missing: Any, rows: Any, last: Any, counts_E: Any) -> None:
    """Give or take the few assignments that float sums left over, from expert `last` on."""
    e = max(last, 0)
    while missing != 0:
        if missing > 0 and counts_E[e] < rows:
            counts_E[e] += 1
            missing -= 1
        elif missing < 0 and counts_E[e] > 0:
            counts_E[e] -= 1
            missing += 1
        else:
            e = (e + 1) % len(counts_E)


@kernel
def draw_cells(
    seed_ML: Any,
    share_MLE: Any,
    first_M: Any,
    prompt_S: Any,
    rows_S: Any,
    rank_S: Any,
    rule: Any,
    counts_MLGE: Any,
) -> None:
    """Add the assignments of every cell. `first_M` is int64 [M + 1], the first sequence of each micro-step."""
    most = 0
    for m in range(len(first_M) - 1):
        most = max(most, first_M[m + 1] - first_M[m])
    counts_SE = np.empty((most, share_MLE.shape[2]), np.int32)
    for m in range(counts_MLGE.shape[0]):
        first, end = first_M[m], first_M[m + 1]
        for layer in range(counts_MLGE.shape[1]):
            draw_sequences(
                seed_ML[m, layer], share_MLE[m, layer], prompt_S[first:end], rows_S[first:end], rule, counts_SE
            )
            for s in range(end - first):
                target = counts_MLGE[m, layer, rank_S[first + s]]
                for e in range(len(target)):
                    target[e] += counts_SE[s, e]

"""Random layouts against the oracle, by canaries: what arrives at a router names the place it was cut from."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute import layout
from tests.layout.layout_cases import canary_trace, decoded, draw_case

SEEDS, SHARDS = range(60), 4
"""Each form is among these with each side; with those of the slow tests, with each number of ranks too."""


@pytest.mark.parametrize(
    "seeds",
    [
        SEEDS,
        pytest.param(range(60, 180), marks=pytest.mark.slow),
        *(pytest.param(range(180 + n, 2400, SHARDS), marks=pytest.mark.exhaustive) for n in range(SHARDS)),
    ],
)
def test_every_rank_gets_the_rows_of_the_oracle_and_gives_them_back_in_packed_order(seeds):
    num_collected = 0
    for seed in seeds:
        case = draw_case(seed)
        canary = canary_trace(case.lengths, case.spec, last_absent=seed % 2 == 0)
        layers = case.spec.layers[seed % 3 :] or case.spec.layers
        plans = []
        for sequences in case.batches:
            for ranks in case.ranks():
                plans.append(case.plan(sequences, *ranks))
                expected = places(case, canary, case.expected(sequences, *ranks), layers)
                seen = seen_places(canary, plans[-1], layers)
                assert np.array_equal(seen, expected), (seed, case, sequences, ranks)
        if sorted(s for batch in case.batches for s in batch) == list(range(len(case.lengths))):
            collected = layout.collect([(each, each.packed_row_R * 7) for each in plans])
            assert collected.tolist() == [7 * n for n in range(sum(case.lengths))], seed
            num_collected += 1
    assert num_collected >= len(seeds) // 2


# The mistakes of integrations: each lays out the case, or the share of (context rank, sequence rank), otherwise.
MISTAKES = {
    "batch first for sequence first": lambda c, r: (replace(c, form="bshd" if c.form == "sbhd" else "sbhd"), r),
    "right for left padding": lambda c, r: (replace(c, side="left" if c.side == "right" else "right"), r),
    "context and sequence ranks swapped": lambda c, r: (c, r[::-1]),
    "another alignment": lambda c, r: (replace(c, align=2 * c.align), r),
    "sequences in another order": lambda c, r: (replace(c, batches=tuple(b[::-1] for b in c.batches)), r),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistaken_layout_is_seen(mistake):
    """Negative control: wherever a mistake moves a cell of the oracle, canaries tell the layouts apart."""
    moved = 0
    for seed in range(80):
        case = replace(draw_case(seed), cp=2, tp=2, align=8, total=(8, 2))
        case = replace(case, form="sbhd" if seed % 2 else case.form)
        wrong, wrong_ranks = MISTAKES[mistake](case, (1, 0))
        canary = canary_trace(case.lengths, case.spec, last_absent=False)
        for sequences, wrong_sequences in zip(case.batches, wrong.batches, strict=True):
            cells = case.expected(sequences, 1, 0)
            seen = seen_places(canary, wrong.plan(wrong_sequences, *wrong_ranks), case.spec.layers)
            is_right = cells == wrong.expected(wrong_sequences, *wrong_ranks)
            assert np.array_equal(seen, places(case, canary, cells, case.spec.layers)) == is_right, (seed, mistake)
            moved += not is_right
    assert moved >= 20, f"{mistake} moved cells in only {moved} layouts, which controls little"


def seen_places(canary, rank_rows, layers):
    """[R, L, 3], what a rank's routers would replay, decoded; the mask and the picks must agree on what is missing."""
    routes = layout.take_routes(canary, rank_rows, layers)
    places = decoded(canary, routes.ids_RLK)
    assert np.array_equal((places >= 0).all(axis=-1), np.broadcast_to(routes.routed_R[:, None], places.shape[:2]))
    return places


def places(case, canary, cells, layers):
    """[R, L, 3], the same from the oracle's cells."""
    columns = [case.spec.layers.index(layer) for layer in layers]
    listed = []
    for cell in cells:
        routed = cell is not None and bool(canary.valid_N[canary.offsets[cell[0]] + cell[1]])
        listed.append([(*cell, column) if routed else (-1, -1, -1) for column in columns])
    return np.array(listed, dtype=np.int64).reshape(len(cells), len(columns), 3)

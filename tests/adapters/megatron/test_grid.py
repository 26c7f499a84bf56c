"""Replay in every way of training in parallel that runs on the CPU.

A sample of the grid runs in CI, in which every pair of values of any two axes occurs; by night each of its 16 variants
in every split of the model. Then layers that are not simply all of them. Score functions are asked of sessions, in
`tests.replay`.
"""

import itertools

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import MOST_RANKS, PARALLEL, SAMPLE, SHAPES, variants_of
from tests.tiers import grid

SPLITS = [cell for cell in PARALLEL if cell.ranks <= MOST_RANKS]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted({cell.ranks for cell in SAMPLE}))
def test_routes_reach_every_router_as_recorded(ranks):
    cells = sorted((cell for cell in SAMPLE if cell.ranks == ranks), key=lambda cell: -cell.pp * cell.vpp)
    run("grid_checks.check_cells", cells, ranks=ranks, timeout=300)


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", SPLITS, ids=[cell.split for cell in SPLITS])
def test_so_they_do_in_every_variant(split):
    run("grid_checks.check_cells", variants_of(split), ranks=split.ranks, timeout=300)


def test_every_pair_of_values_is_in_the_sample():
    def values(cells):
        axes = ("ep", "tp", "cp", "recompute", "dispatcher", "packed")
        return [{"stages": (cell.pp, cell.vpp)} | {axis: getattr(cell, axis) for axis in axes} for cell in cells]

    every = [cell for split in SPLITS for cell in variants_of(split)]
    assert set(SAMPLE) <= set(every)
    for one, other in itertools.combinations(values(every)[0], 2):
        wanted, found = ({(cell[one], cell[other]) for cell in values(cells)} for cells in (every, SAMPLE))
        assert found == wanted, (one, other)


BY_NIGHT = ("experts over four ranks", "multi-token prediction", "short last virtual stages, dense first")


@grid(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in BY_NIGHT else name for name in SHAPES], quick=1
)
def test_routes_find_their_layers(name):
    run("grid_checks.check_cell", SHAPES[name], ranks=SHAPES[name].ranks)

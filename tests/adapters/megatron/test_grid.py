"""Replay in every way of training in parallel that runs on the CPU.

One test per split of the model. Two of its 16 variants run by default, so that every pair of values of any two axes
occurs on some split; `make night PART=megatron` runs all of them.
"""

import itertools
import os

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import MOST_RANKS, PARALLEL, variants_of

EVERY = "FOREROUTE_MEGATRON_GRID" in os.environ
SPLITS = [cell for cell in PARALLEL if cell.ranks <= MOST_RANKS]


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=[cell.split for cell in SPLITS])
def test_routes_reach_every_router_as_recorded(split):
    run("grid_checks.check_cells", variants_of(split, EVERY), ranks=split.ranks, timeout=300)


def test_every_pair_of_values_is_among_the_cells_that_run_by_default():
    def values(every):
        cells = [cell for split in SPLITS for cell in variants_of(split, every)]
        axes = ("ep", "tp", "cp", "recompute", "dispatcher", "packed")
        return [{"stages": (cell.pp, cell.vpp)} | {axis: getattr(cell, axis) for axis in axes} for cell in cells]

    for one, other in itertools.combinations(values(True)[0], 2):
        wanted, found = ({(cell[one], cell[other]) for cell in values(every)} for every in (True, False))
        assert found == wanted, (one, other)

"""Replay in every way of training in parallel that runs on the CPU.

One test per split of the model. Four of its 16 variants run by default, so that every recomputation, dispatcher and
packing occurs on every split; `make night PART=megatron` runs all of them.
"""

import os

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import MOST_RANKS, PARALLEL, variants_of

pytestmark = pytest.mark.slow

EVERY = "FOREROUTE_MEGATRON_GRID" in os.environ
SPLITS = [cell for cell in PARALLEL if cell.ranks <= MOST_RANKS]


@pytest.mark.parametrize("split", SPLITS, ids=[cell.split for cell in SPLITS])
def test_routes_reach_every_router_as_recorded(split):
    run("grid_checks.check_cells", variants_of(split, EVERY), ranks=split.ranks, timeout=300)

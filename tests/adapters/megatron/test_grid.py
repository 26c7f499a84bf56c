"""Replay in every way of training in parallel that runs on the CPU, and of layers that are not simply all of them.

Score functions are asked of sessions, in `tests.replay`.
"""

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import SAMPLE, SHAPES
from tests.tiers import grid


@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted({cell.ranks for cell in SAMPLE}))
def test_routes_reach_every_router_as_recorded(ranks):
    cells = sorted((cell for cell in SAMPLE if cell.ranks == ranks), key=lambda cell: -cell.pp * cell.vpp)
    run("grid_checks.check_cells", cells, ranks=ranks, timeout=300)


@grid("name", SHAPES, quick=1)
def test_routes_find_their_layers(name):
    run("grid_checks.check_cell", SHAPES[name], ranks=SHAPES[name].ranks)

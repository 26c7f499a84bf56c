"""Replay in every way of training in parallel that runs on the CPU, and of layers that are not simply all of them."""

import os
from importlib import metadata

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


def version():
    import megatron.core

    return megatron.core.__version__


def test_the_megatron_that_runs_is_the_one_asked_for():
    """`make test-megatron-newest` puts another before the one that is installed, and says which."""
    [found] = run("test_grid.version")
    # Megatron adds the commit of a repository that it lies in
    assert found.split("+")[0] == os.environ.get("FOREROUTE_MEGATRON", metadata.version("megatron-core"))

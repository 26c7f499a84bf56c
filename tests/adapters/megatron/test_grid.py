"""Replay in every way of training in parallel that runs on the CPU, and of layers that are not simply all of them.

Score functions are asked of sessions, in `tests.replay`.
"""

import itertools

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import AXES, EXECUTED_AXES, EXECUTED_BY_NIGHT, SAMPLE, SAMPLED, SHAPES
from tests.tiers import grid


@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted({cell.ranks for cell in SAMPLE}))
def test_routes_reach_every_router_as_recorded(ranks):
    cells = sorted((cell for cell in SAMPLE if cell.ranks == ranks), key=lambda cell: -cell.pp * cell.vpp)
    run("grid_checks.check_cells", cells, ranks=ranks, timeout=300)


def test_every_pair_of_values_is_in_the_samples():
    replayed = [[getattr(cell, axis) for axis in AXES] for cell in SAMPLE]
    executed = [row for name in SAMPLED.keys() - set(EXECUTED_BY_NIGHT) for row in SAMPLED[name]]
    for rows, axes in ((replayed, list(AXES.values())), (executed, EXECUTED_AXES)):
        for one, other in itertools.combinations(range(len(axes)), 2):
            assert {(row[one], row[other]) for row in rows} == set(itertools.product(axes[one], axes[other]))


BY_NIGHT = "short last virtual stages, dense first"


@grid(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name == BY_NIGHT else ()) for name in SHAPES], quick=1
)
def test_routes_find_their_layers(name):
    run("grid_checks.check_cell", SHAPES[name], ranks=SHAPES[name].ranks)

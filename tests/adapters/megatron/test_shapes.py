"""Replay where routed layers are not simply all of them, and under every score function."""

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import SCORES, SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_routes_find_their_layers(name):
    run("grid_checks.check_cells", [SHAPES[name]], ranks=SHAPES[name].ranks)


@pytest.mark.parametrize("name", SCORES)
def test_routes_are_followed_under_every_score_function(name):
    run("grid_checks.check_cells", [SCORES[name]], ranks=1)

"""EPLB's placement is the published one, copy by copy."""

import numpy as np
import pytest
import torch

from benchmarks.harness.eplb_published import published_placement
from foreroute.errors import TopologyError
from foreroute.simulate.eplb import eplb_placement

README_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
README_MAP = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
SHAPES = [(12, 16, 8), (128, 144, 8), (128, 160, 16), (128, 192, 64), (256, 320, 64), (64, 64, 8)]
"""Experts, copies and ranks."""


def test_the_published_form_gives_the_map_of_its_readme():
    """Two layers of 12 experts in 4 groups, 16 copies, 2 nodes, 8 ranks."""
    assert published_placement(torch.tensor(README_LOADS), 16, 4, 2, 8).tolist() == README_MAP


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ties", [False, True])
def test_equal_to_the_published_form(shape, ties):
    rng = np.random.default_rng(shape[1])
    loads_LE = (
        rng.integers(0, 4, (6, shape[0])) if ties else (rng.dirichlet(np.ones(shape[0]), 6) * 500_000).astype(int)
    )
    ours = [eplb_placement(loads_E, *shape[1:]).tolist() for loads_E in loads_LE]
    assert ours == published_placement(torch.tensor(loads_LE), shape[1], 1, 1, shape[2]).tolist()


@pytest.mark.parametrize("shape", [(18, 4), (8, 4)])
def test_what_does_not_divide_is_refused(shape):
    with pytest.raises(TopologyError, match="do not divide"):
        eplb_placement(np.arange(12), *shape)

"""Homes that move once a step, or are a step old, and sequences packed for them: by loops over the drawn sequences."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.planner.homes import place_homes
from foreroute.simulate.methods import METHODS, serve
from foreroute.simulate.steps import group_steps
from tests.simulate.simulate_cases import small_config


@pytest.fixture(scope="module")
def drawn():
    config = small_config(gpus=8, micro_steps=6, groups=2)
    cluster = config.described()
    return list(group_steps(config, cluster.topology, cluster.costs)), cluster


def served(name, step, cluster):
    found = serve(METHODS[name], step, cluster.costs)
    assert all(len(hosts.expert_R) == 0 for hosts in found.passes)
    return found


def slowest(counts_MLGE, home_LE):
    """By the definition: the sum over cells of the slowest rank."""
    total = 0
    for counts_LGE in counts_MLGE:
        for counts_GE, home_E in zip(counts_LGE, home_LE, strict=True):
            loads = [0] * len(counts_GE)
            for expert, home in enumerate(home_E):
                loads[home] += int(counts_GE[:, expert].sum())
            total += max(loads)
    return total


def test_homes_of_this_step_move_once_and_level_it(drawn):
    for step in drawn[0]:
        found = served("ours_homes", step, drawn[1])
        assert np.array_equal(found.before_LE, step.home_LE)
        assert found.home_moves == (found.home_LE != step.home_LE).sum() > 0
        # the same tokens: layers and experts get the same in all, and no rank more than one had
        assert np.array_equal(found.counts_MLGE.sum(axis=(0, 2)), step.counts_MLGE.sum(axis=(0, 2)))
        most = step.counts_MLGE.sum(axis=3).max()
        assert found.counts_MLGE.sum(axis=3).max() <= most
        assert found.squares_MG.sum() == step.squares_MG.sum()
        placed_LE = place_homes(step.counts_MLGE, step.topology, step.home_LE)
        levels = [
            slowest(*each)
            for each in (
                (found.counts_MLGE, found.home_LE),
                (step.counts_MLGE, placed_LE),
                (step.counts_MLGE, step.home_LE),
            )
        ]
        assert levels[0] < levels[1] < levels[2]
        loads_MLG = found.loads(step.topology).served_SMLG[0]
        assert loads_MLG.max(axis=2).sum() == levels[0]


def test_homes_of_the_step_before_move_nothing_and_are_those_that_levelled_it(drawn):
    for step in drawn[0]:
        found = served("ours_homes_previous", step, drawn[1])
        of_counts = replace(step, sequences=None, previous_sequences=None)
        assert found.home_moves == served("ours_homes_previous", of_counts, drawn[1]).home_moves == 0
        assert np.array_equal(found.home_LE, step.previous_sequences().with_homes(step.topology, step.home_LE)[1])
        assert slowest(found.counts_MLGE, found.home_LE) < slowest(step.counts_MLGE, found.home_LE)

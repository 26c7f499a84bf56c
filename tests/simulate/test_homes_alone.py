"""Homes that move once a step, or are a step old, and sequences packed for them: by loops over the drawn sequences."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.planner.homes import place_homes
from foreroute.simulate.ep_group import EPGroup
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


def test_drawn_sequences_are_those_of_the_counts(drawn):
    steps, cluster = drawn
    assert len(steps) == 2
    for step in steps:
        sequences = step.sequences()
        assert np.array_equal(sequences.counts_MLGE(), step.counts_MLGE)
        assert (sequences.counts_SLE.sum(axis=2) == cluster.costs.model.top_k * sequences.lengths_S[:, None]).all()
        held_MG, squares_MG = np.zeros((2, 6, 4), np.int64)
        for length, m, rank in zip(
            sequences.lengths_S, sequences.packing.micro_step_S, sequences.packing.rank_S, strict=True
        ):
            held_MG[m, rank] += length
            squares_MG[m, rank] += length**2
        assert sequences.token_budget == held_MG.max()
        assert np.array_equal(squares_MG, step.squares_MG)
    before_LE = sum(step.previous_sequences().counts_SLE.sum(axis=0) for step in steps)
    assert np.array_equal(before_LE, steps[0].previous_LE)


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
        assert levels == sorted(levels)
        assert levels[0] < levels[2]
        loads_MLG = found.loads(step.topology).served_SMLG[0]
        assert loads_MLG.max(axis=2).sum() == levels[0]


def test_homes_of_the_step_before_stay(drawn):
    step, cluster = drawn[0][0], drawn[1]
    found = served("ours_homes_previous", step, cluster)
    assert found.home_moves == 0
    _, expected_LE = step.previous_sequences().with_homes(step.topology, step.home_LE)
    assert np.array_equal(found.home_LE, expected_LE)
    packed = step.sequences().packed_for(expected_LE)
    assert np.array_equal(found.counts_MLGE, packed.counts_MLGE())
    assert slowest(found.counts_MLGE, found.home_LE) < slowest(step.counts_MLGE, found.home_LE)
    # where only loads are known, by these; nothing is packed anew without sequences
    loads = replace(step, previous_sequences=None, sequences=None)
    found = served("ours_homes_previous", loads, cluster)
    assert np.array_equal(found.counts_MLGE, step.counts_MLGE)
    assert found.squares_MG is step.squares_MG
    totals = np.zeros_like(step.counts_MLGE[:1])
    totals[0, :, 0] = step.previous_LE
    assert np.array_equal(found.home_LE, place_homes(totals, step.topology, step.home_LE))
    huge = replace(loads, previous_LE=step.previous_LE << 30)
    assert np.array_equal(served("ours_homes_previous", huge, cluster).home_LE, found.home_LE)


def test_attention_is_of_the_sequences_where_they_are_packed(drawn):
    step, cluster = drawn[0][0], drawn[1]
    found = served("ours_homes", step, cluster)
    group = EPGroup.of(found, step, cluster.costs, overlap=0.0)
    tokens_MG = found.counts_MLGE[:, 0].sum(axis=2) / cluster.costs.model.top_k
    expected_MG = cluster.costs.attention_seconds(tokens_MG, found.squares_MG)
    assert np.allclose(group.recompute.attention_MG2[..., 0], expected_MG)
    assert not np.array_equal(found.squares_MG, step.squares_MG)

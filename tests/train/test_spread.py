"""Training on several ranks: equal to one process on the same rollouts, under a plan and without."""

import numpy as np
import pytest
import torch

from spreading import config_of, spread_steps, steps_alone, steps_without_sums

STEPS = 2
EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.mark.parametrize(
    "parallel",
    [
        {"routing": "R3"},
        {"routing": "R3", "redundant_slots": 0},
        {"routing": "R2", "slots": "shared", "paths": "direct"},
        {"routing": "none"},
    ],
    ids=["R3", "R3_at_home", "R2_shared_slots", "live"],
)
def test_two_ranks_learn_what_one_process_learns_from_their_rollouts(workers, parallel):
    learn_alike(workers, config_of(2, **parallel))


def learn_alike(workers, config):
    spread, *_ = workers(config.parallel.expert).run(spread_steps, config, STEPS)
    alone = steps_alone(config, spread.generations)
    for ours, truth in zip(spread.records, alone.records, strict=True):
        assert truth["grad_norm"] > 0
        same_numbers(ours, truth)
    same_numbers(spread.state, alone.state)
    return spread.records


def test_plans_change_the_load_and_nothing_that_is_learned(workers):
    planned, *_ = workers(2).run(spread_steps, config_of(2, mini_steps=2), STEPS)
    at_home, *_ = workers(2).run(spread_steps, config_of(2, mini_steps=2, redundant_slots=0), STEPS)
    for ours, theirs in zip(planned.records, at_home.records, strict=True):
        ours, theirs = dict(ours), dict(theirs)
        figures, figures_at_home = ours.pop("execution"), theirs.pop("execution")
        same_numbers(ours, theirs)
        assert figures["max_over_mean"]["at_home"] == pytest.approx(figures_at_home["max_over_mean"]["executed"])
        assert figures["max_over_mean"]["executed"] < figures["max_over_mean"]["at_home"]
        assert figures["replicas"] > figures_at_home["replicas"] == 0
        assert sum(figures_at_home["bytes"].values()) == 0
    same_numbers(planned.state, at_home.state)


def test_replicas_that_are_late_leave_their_cells_to_the_homes(workers):
    """A deadline that no transfer meets; the gradients are the same, the load is not the plan's."""
    config = config_of(2, deadline_s=0.0, prefetch=0, paths="direct", checksums=True)
    figures = [record["execution"] for record in learn_alike(workers, config)]
    assert all(each["cells_at_home"] > 0 for each in figures)
    assert all(each["max_over_mean"]["executed"] > each["max_over_mean"]["planned"] for each in figures)


def test_every_rank_computes_what_was_planned_for_it(workers):
    spread, *_ = workers(2).run(spread_steps, config_of(2, mini_steps=2), STEPS)
    for record, generation in zip(spread.records, spread.generations, strict=True):
        figures = record["execution"]
        assert figures["stages"].keys() == {"recompute", "update 0", "update 1"}
        for stage in figures["stages"].values():
            executed_MLG = np.array(stage["executed_MLG"])
            assert executed_MLG.tolist() == stage["planned_MLG"]
            assert (executed_MLG.sum(axis=2) == np.array(stage["at_home_MLG"]).sum(axis=2)).all()
        rows = int(generation.trace.valid_N.sum())
        recomputed_MLG = np.array(figures["stages"]["recompute"]["executed_MLG"])
        assert (recomputed_MLG.sum(axis=(0, 2)) == rows * generation.trace.spec.top_k).all()
        assert figures["bytes"]["host"] + figures["bytes"]["direct"] > 0
        assert figures["bytes"]["gradients"] > 0
        assert figures["exposed_planning_s"] <= figures["planning_s"] + 0.01


def test_gradients_that_are_not_added_up_are_noticed(workers):
    """A control: the comparison must see ranks that train on their own."""
    config = config_of(2)
    spread, *_ = workers(2).run(steps_without_sums, config, STEPS)
    alone = steps_alone(config, spread.generations)
    with pytest.raises(AssertionError):
        same_numbers(spread.state, alone.state)


def test_four_ranks_in_two_nodes_learn_it_too(workers):
    learn_alike(workers, config_of(4, ranks_per_node=2))


def same_numbers(ours, truth):
    """Times, and what only several ranks record, are left out; so are loads, whose micro-steps differ."""
    if isinstance(truth, dict):
        for key in truth.keys() - {"seconds", "expert_load"}:
            same_numbers(ours[key], truth[key])
    elif isinstance(truth, torch.Tensor):
        torch.testing.assert_close(ours, truth, **EXACT)
    elif isinstance(truth, list | tuple) and truth and isinstance(truth[0], dict):
        for one, other in zip(ours, truth, strict=True):
            same_numbers(one, other)
    elif isinstance(truth, str | None):
        assert ours == truth
    else:
        np.testing.assert_allclose(ours, truth, **EXACT)

"""Training on several ranks: equal to one process on the same rollouts, under a plan and without."""

import numpy as np
import pytest
import torch

from foreroute.errors import ConfigError
from tests.train.expert_parallel_steps import config_of, dense_elements, parallel_steps, steps_alone, steps_without_sums

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
    steps, *_ = workers(config.parallel.expert).run(parallel_steps, config, STEPS)
    learned_alike(steps, config)
    return steps.records


def learned_alike(steps, config):
    alone = steps_alone(config, steps.generations)
    for ours, truth in zip(steps.records, alone.records, strict=True):
        assert truth["grad_norm"] > 0
        same_numbers(ours, truth)
    same_numbers(steps.state, alone.state)


@pytest.fixture(scope="module")
def planned(workers):
    """Two rollouts, and two optimizer steps on each, by two ranks."""
    return workers(2).run(parallel_steps, config_of(2, mini_steps=2), STEPS)[0]


def test_plans_change_the_load_and_nothing_that_is_learned(workers, planned):
    at_home, *_ = workers(2).run(parallel_steps, config_of(2, mini_steps=2, redundant_slots=0), STEPS)
    for ours, theirs in zip(planned.records, at_home.records, strict=True):
        ours, theirs = dict(ours), dict(theirs)
        figures, figures_at_home = ours.pop("execution"), theirs.pop("execution")
        same_numbers(ours, theirs)
        assert figures["max_over_mean"]["at_home"] == pytest.approx(figures_at_home["max_over_mean"]["executed"])
        assert figures["max_over_mean"]["executed"] < figures["max_over_mean"]["at_home"]
        assert figures["replicas"] > figures_at_home["replicas"] == 0
        assert sum(figures_at_home["bytes"].values()) == 0
    same_numbers(planned.state, at_home.state)


def test_gradients_that_are_not_added_up_are_noticed(workers):
    """A control: the comparison must see ranks that train on their own."""
    config = config_of(2)
    parallel, *_ = workers(2).run(steps_without_sums, config, STEPS)
    alone = steps_alone(config, parallel.generations)
    with pytest.raises(AssertionError):
        same_numbers(parallel.state, alone.state)


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


def test_sharded_dense_parameters_learn_what_replicated_ones_learn(workers, planned):
    config = config_of(2, mini_steps=2, dense="fsdp2")
    checkpointed = config.model.model_copy(update={"gradient_checkpointing": True})
    sharded, *_ = workers(2).run(parallel_steps, config.model_copy(update={"model": checkpointed}), STEPS)
    for ours, theirs in zip(sharded.records, planned.records, strict=True):
        assert theirs["grad_norm"] > 0
        assert ours["execution"]["stages"] == theirs["execution"]["stages"]
        same_numbers(*({key: value for key, value in each.items() if key != "execution"} for each in (ours, theirs)))
    same_numbers(sharded.state, planned.state)


def test_sharded_ranks_hold_half_of_what_is_dense(workers):
    whole, *_ = workers(2).run(dense_elements, config_of(2))
    shares = [part / whole for part in workers(2).run(dense_elements, config_of(2, dense="fsdp2"))]
    assert sum(shares) == 1
    assert all(0.4 < share < 0.6 for share in shares)
    with pytest.raises(ConfigError, match='dense = "fsdp2" spreads parameters over ranks'):
        config_of(1, dense="fsdp2")

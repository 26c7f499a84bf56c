"""Training on several ranks: equal to one process on the same rollouts, under a plan and without."""

import re

import numpy as np
import pytest
import torch

from foreroute.train.config import RLConfig
from tests.train.expert_parallel_steps import (
    ONE_LAYER,
    config_of,
    parallel_steps,
    steps_alone,
    steps_budgeted,
    steps_unscaled,
)
from tests.train.small_runs import SIZES

STEPS = 2
EXACT = {"rtol": 1e-9, "atol": 1e-11}
WAYS = {
    "R2_shared_slots": {
        "routing": "R2",
        "paths": "direct",
        "plan": {"slots": "shared", "home_moves": "all", "packing": "routes"},
    },
    "R3_recomputed_homes_move": {
        "routing": "R3",
        "paths": "host",
        "plan": {"home_moves": 4, "packing": "routes"},
        "model": {"gradient_checkpointing": True},
        "method": "gspo",
        "correction": {"method": "tis", "high": 1.01},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", WAYS.values(), ids=WAYS)
def test_two_ranks_learn_what_one_process_learns_from_their_rollouts(workers, parallel):
    records = learn_alike(workers, config_of(2, **parallel))
    if "correction" in parallel:
        for seen in (record["importance"] for record in records):
            assert 0 < seen["effective_share"] < 1
            assert 0 < seen["cut_share"] < 1
    for execution in (record["execution"] for record in records if record["execution"]["passes"]):
        for load in ("executed", "at_home"):
            cells = [cell for each in execution["passes"].values() for layers in each[f"{load}_MLG"] for cell in layers]
            busiest, mean = sum(map(max, cells)), sum(map(sum, cells)) / 2
            assert execution["max_over_mean"][load] == pytest.approx(busiest / mean)
        assert execution["max_over_mean"]["planned"] == execution["max_over_mean"]["executed"]
        # gate and up, and down, in float64
        expert = 8 * 3 * SIZES["hidden_size"] * SIZES["moe_intermediate_size"]
        arrived, by_host = execution["bytes"], parallel.get("paths") == "host"
        weights, other = (arrived[way] for way in (("host", "direct") if by_host else ("direct", "host")))
        assert other == weights % expert == arrived["gradients"] % expert == 0
        assert 0 < arrived["gradients"] <= weights <= expert * execution["replicas"]
        moves = parallel.get("plan", {}).get("home_moves", 0)
        assert bool(execution["bytes"]["homes"]) == (execution["home_moves"] > 0) == bool(moves)
        assert moves != 4 or execution["home_moves"] <= 4 * SIZES["num_hidden_layers"]


@pytest.mark.slow
def test_a_budget_of_memory_takes_one_micro_step_more_and_changes_no_gradient(workers):
    """In float64. A budget that no packing keeps is refused before the step, on both ranks alike."""
    config = config_of(2, model=ONE_LAYER)
    config = config.model_copy(update={"rl": RLConfig(micro_step_tokens=512)})
    (plenty, kept, refused), (*_, other) = workers(2).run(steps_budgeted, config)
    updates = [len(one.records[0]["execution"]["passes"]["update 0"]["executed_MLG"]) for one in (plenty, kept)]
    assert updates == [1, 2]
    peaks = [one.records[0]["execution"]["forecast_memory_bytes"] for one in (plenty, kept)]
    assert 0 < peaks[1] < peaks[0]
    for key in ("loss", "grad_norm", "tokens", "clip_share"):
        assert kept.records[0][key] == pytest.approx(plenty.records[0][key], rel=1e-12)
    for number, moments in plenty.state["optimizer"]["state"].items():
        seen, exact = kept.state["optimizer"]["state"][number]["exp_avg"], moments["exp_avg"]
        torch.testing.assert_close(seen, exact, rtol=1e-12, atol=1e-12 * float(exact.abs().max()))
    assert refused == other
    assert re.match(
        r"rank \d would take [\d,]+ bytes in micro-step \d, in the \w+( of routed layer \d)?, and may", other
    )


def learn_alike(workers, config, count=STEPS, run=parallel_steps):
    steps, *_ = workers(config.parallel.expert).run(run, config, count)
    alone = steps_alone(config, steps.generations)
    for ours, truth in zip(steps.records, alone.records, strict=True):
        assert truth["grad_norm"] > 0
        same_numbers(ours, truth)
    same_numbers(steps.state, alone.state)
    return steps.records


@pytest.mark.slow
def test_each_update_of_a_rollout_runs_on_replicas_of_the_weights_before_it(workers):
    """As with every expert at its home. One process would make other mini-batches."""
    planned, at_home = (
        workers(2).run(parallel_steps, config_of(2, mini_steps=2, model=ONE_LAYER, redundant_slots=slots), 1)[0]
        for slots in (2, 0)
    )
    for ours, theirs in zip(planned.records, at_home.records, strict=True):
        assert ours["execution"]["replicas"] > theirs["execution"]["replicas"] == 0
        same_numbers(*({key: value for key, value in each.items() if key != "execution"} for each in (ours, theirs)))
    same_numbers(planned.state, at_home.state)


@pytest.mark.slow
def test_gradients_of_another_scale_are_noticed(workers):
    """A control: clipping and AdamW hide most of it."""
    with pytest.raises(AssertionError, match=r"equal.*tolerance"):
        learn_alike(workers, config_of(2, model=ONE_LAYER), 1, steps_unscaled)


def same_numbers(ours, truth):
    """Times, and what only several ranks record, are left out; so is what the sentinel of each rank has seen."""
    if isinstance(truth, dict):
        for key in truth.keys() - {"seconds", "sentinel"}:
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

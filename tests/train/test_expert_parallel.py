"""Training on several ranks: equal to one process on the same rollouts, under a plan and without."""

import re

import numpy as np
import pytest
import torch

from foreroute.train.config import RLConfig
from tests.tiers import grid
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
        "plan": {"home_moves": 4, "packing": "routes"},
        "model": {"gradient_checkpointing": True},
        "method": "gspo",
        "correction": {"kind": "tis", "high": 1.01},
    },
    "live": {"routing": "none"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [pytest.param(WAYS[name], marks=pytest.mark.exhaustive if name == "live" else (), id=name) for name in WAYS],
)
def test_two_ranks_learn_what_one_process_learns_from_their_rollouts(workers, parallel):
    records = learn_alike(workers, config_of(2, **parallel))
    if "correction" in parallel:
        for seen in (record["importance"] for record in records):
            assert 0 < seen["effective_share"] < 1
            assert 0 < seen["cut_share"] < 1
    for execution in (record["execution"] for record in records if record["execution"]["passes"]):
        moves = parallel.get("plan", {}).get("home_moves", 0)
        assert bool(execution["bytes"]["homes"]) == (execution["home_moves"] > 0) == bool(moves)
        assert moves != 4 or execution["home_moves"] <= 4 * SIZES["num_hidden_layers"]


@pytest.mark.slow
def test_slowest_ranks_of_a_packing_by_routes_have_less(workers):
    """Counted by the executor. The bound is of each layer the busiest rank of the pass."""
    executions = []
    for packing in ("length", "routes"):
        config = config_of(2, model=ONE_LAYER, redundant_slots=0, plan={"packing": packing, "home_moves": 2})
        config = config.model_copy(update={"rl": RLConfig(micro_step_tokens=32)})  # so that there are several
        executions.append(workers(2).run(parallel_steps, config, 1)[0].records[0]["execution"])
    truth, ours = executions
    loads = [[np.array(each["at_home_MLG"]) for each in one["passes"].values()] for one in (truth, ours)]
    slowest = [sum(int(load_MLG.max(axis=2).sum()) for load_MLG in one) for one in loads]
    bound = sum(int(load_MLG.sum(axis=0).max(axis=1).sum()) for load_MLG in loads[0])
    assert ours["packing"] == {"bound": bound, "by_length": slowest[0], "by_routes": slowest[1]}
    assert bound <= slowest[1] < slowest[0]
    assert truth["packing"] == {}
    assert truth["home_moves"] == ours["home_moves"] > 0, "sequences are exchanged for the homes that experts move to"
    for before, after in zip(*loads, strict=True):
        assert (before.sum(axis=(0, 2)) == after.sum(axis=(0, 2))).all(), "the same tokens"


@grid("measures", [False, True], quick=0, day=1)
def test_a_budget_of_memory_takes_one_micro_step_more_and_changes_no_gradient(workers, measures):
    """In float64. A budget that no packing keeps is refused before the step, on both ranks alike."""
    config = config_of(2, model=ONE_LAYER)
    config = config.model_copy(update={"rl": RLConfig(micro_step_tokens=512)})
    (plenty, kept, refused), (*_, other) = workers(2).run(steps_budgeted, config, measures)
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


TOPOLOGY = """
topology = {{num_ranks = 2, ranks_per_node = 1, redundant_slots = 2}}
hardware = {{preset = "h100"}}

[links]
cluster_bytes_per_s = 1e6
node_latency_s = 1e-9
cluster_latency_s = 1e-9
{links}

[model]
num_layers = 1
num_experts = 16
top_k = 2
hidden = 32
intermediate = 16
dense_parameters = 4096
attention_width = 32
vocabulary = 16
weight_bytes = {weight_bytes}
gradient_bytes = 1e-3
"""


@pytest.mark.slow
def test_plans_go_by_the_prices_of_a_topology_file(workers, tmp_path):
    """Over a slow link between nodes of one rank, replicas keep tokens in them; where weights are large, none pays."""
    cheap, dear = tmp_path / "cheap.toml", tmp_path / "dear.toml"
    cheap.write_text(TOPOLOGY.format(links="", weight_bytes=1e-3))
    large = TOPOLOGY.replace("intermediate = 16", "intermediate = 128")
    dear.write_text(large.format(links="node_bytes_per_s = 1e6", weight_bytes=8))
    configs = (
        config_of(2, model=ONE_LAYER, topology=str(path), **paths)
        for path, paths in ((cheap, {}), (dear, {"paths": "direct"}))
    )
    short, none = (workers(2).run(parallel_steps, each, 1)[0].records[0]["execution"] for each in configs)
    assert short["replicas"] > none["replicas"] == 0
    for execution, said in ((short, "by the plan: it saves"), (none, "at homes: the plan has no replicas")):
        for name, stage in execution["passes"].items():
            assert stage["priced_options"].pop(name.split()[0]).startswith(said)
            assert set(stage["priced_options"].values()) == {"on: where it saves time"}


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
    """Times, and what only several ranks record, are left out; so are loads, whose micro-steps differ, and
    what the sentinel of each rank has seen.
    """
    if isinstance(truth, dict):
        for key in truth.keys() - {"seconds", "expert_load", "sentinel"}:
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

"""verl's Megatron engine on two ranks that share experts: its routes, and its plans as they were executed."""

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")
pytest.importorskip("mbridge", reason="there is no mbridge in this environment: run `make night PART=verl`")

from examples.verl.tiny_checkpoint import save_policy
from foreroute.errors import ConfigError
from foreroute.testing.ranks import environment
from foreroute.trainers.verl.planning import PlanningMegatronConfig
from foreroute.trainers.verl.settings import require_supported_by_megatron
from tests.trainers.verl.verl_book import Book
from tests.trainers.verl.verl_ranks import run_each

SHARE = 8
"""Sequences of each rank, of twice as many."""
TOKENS = 32
"""Most of a micro-batch."""
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RUNS = {
    "plain": {},
    "planned": {"plans": True},
    "planned, recomputed": {"plans": True, "transformer": FULL},
    "planned, offloaded": {"plans": True, "param_offload": True, "optimizer_offload": True},
    "planned, by routes": {"plans": True, "packing": "routes"},
    "planned, resumed": {"plans": True, "resumes": True},
}
PLANNED = [name for name, settings in RUNS.items() if settings.get("plans") and not settings.get("resumes")]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """mbridge knows of no dense layers in Qwen3-MoE."""
    return save_policy(tmp_path_factory.mktemp("policy"), mlp_only_layers=[])


@pytest.fixture(scope="module")
def book(policy):
    return Book(policy, count=2 * SHARE)


@pytest.fixture(scope="module")
def found(policy):
    return run_each(2, "megatron_worker.train", policy, RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_routers_hand_on_the_routes_of_the_rollout_in_every_pass(name, found, book):
    for rank, results in enumerate(found[name]):
        mine = book.routes[SHARE * rank : SHARE * (rank + 1)]
        for step, old in enumerate(results["old"]):
            for layer in range(3):
                wanted = routed([routes[:, layer] for routes in mine])
                # the first micro-batch of a run goes by its own routes once, to be held against those of the rollout
                first = 1 if step == 0 else 0
                assert not wanted - picked(old["routed"][layer][first:])
        for update in results["update"]:
            for layer in range(3):
                wanted = routed([routes[:, layer] for routes in mine])
                times = 2 if "recomputed" in name else 1
                seen = picked(update["routed"][layer])
                assert all(seen[experts] >= times * count for experts, count in wanted.items())
        assert all(metrics["mismatch/disagreement"] == [0.0] for metrics in results["metrics"])
        assert all(metrics["mismatch/native_disagreement"][0] > 0.05 for metrics in results["metrics"])


@pytest.mark.parametrize("name", PLANNED)
def test_experts_compute_the_rows_of_the_plan_from_the_second_micro_batch_on(name, found, book):
    ranks = found[name]
    for step in range(len(ranks[0]["planned"])):
        assert ranks[1]["planned"][step] == []  # one rank plans for both
        for which, passes in (("old", 0), ("update", 1)):
            planned_MLG = ranks[0]["planned"][step][passes]
            executed_MLG = np.stack([rows_of(rank[which][step], name, which) for rank in ranks], -1)
            if (step, which) == (0, "old"):
                executed_MLG = executed_MLG[1:]  # the first is held against the model's own routes
            assert len(planned_MLG) == len(executed_MLG) - 1 > 1
            assert np.array_equal(executed_MLG[1:], planned_MLG)
            # every row of every sequence is computed once, the last one of each too
            tokens = sum(len(prompt) + len(response) for prompt, response in book.pairs)
            assert (executed_MLG.sum((0, 2)) == 2 * tokens).all()
        metrics = ranks[0]["metrics"][step]
        assert metrics["plan/rows_off"] == [0.0]
        assert metrics["plan/imbalance_executed"] == metrics["plan/imbalance_planned"]
        assert metrics["plan/imbalance_executed"][0] < metrics["plan/imbalance_static"][0]
        assert "plan/imbalance_first" in metrics
    assert metrics["plan/imbalance_executed"][0] == pytest.approx(max_over_mean(ranks, name))


@pytest.mark.shows("verl, Megatron engine", "`packing=routes`, with plans")
def test_sequences_share_micro_steps_by_their_routes_within_the_token_budget(found):
    """Log-probs in the order of the batch, and weights, are held against other groupings in test_verl_parallel.py."""
    by_length, by_routes = found["planned"], found["planned, by routes"]
    for step, (before, after) in enumerate(zip(by_length[0]["metrics"], by_routes[0]["metrics"], strict=True)):
        assert after["plan/imbalance_static"][0] < before["plan/imbalance_static"][0]
        for which in ("old", "update"):
            sizes, others = (
                [len(rows) for rows in ranks[1][which][step]["routed"][0]] for ranks in (by_routes, by_length)
            )
            assert len(sizes) == len(others)
            assert max(sizes) <= TOKENS
        # the smallest micro-steps are at both ends
        total_M = np.sum([[len(rows) for rows in rank["update"][step]["routed"][0]] for rank in by_routes], axis=0)
        change_M = np.sign(np.diff(total_M))
        assert (np.diff(change_M[change_M != 0]) <= 0).all()
    assert apart(by_length[0]["weights"], by_routes[0]["weights"]) > 0  # the control: groups are others


@pytest.mark.shows(
    "verl, Megatron engine", "expert parallelism, plans, full recomputation, offload of parameters and optimizer"
)
def test_recomputation_memory_of_the_host_and_a_checkpoint_change_no_bit_of_weights_under_plans(found):
    """What plans are held against is in test_verl_parallel.py, in float32."""
    first = found["planned"][0]["weights"]
    for name in ("planned", "planned, recomputed", "planned, offloaded", "planned, resumed"):
        assert [apart(first, rank["weights"]) for rank in found[name]] == [0, 0], name
    assert apart(first, found["plain"][0]["weights"]) > 0  # the control: other sums are seen


@pytest.mark.shows(
    "verl, Megatron engine", "`dynamic_context_parallel`", refused="verl splits no batch into micro-batches under it"
)
@pytest.mark.shows("verl, Megatron engine", "plans without R3 or R2", refused="a plan is made of routes that are known")
def test_settings_that_replay_or_plans_do_not_go_with_are_refused():
    model = SimpleNamespace(lora={})
    dynamic = PlanningMegatronConfig(dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=64)
    with pytest.raises(ConfigError, match="dynamic_context_parallel"):
        require_supported_by_megatron(dynamic, model, replays=True, plans=True)
    with pytest.raises(ConfigError, match=r"router_replay\.mode=R3"):
        require_supported_by_megatron(PlanningMegatronConfig(), model, replays=False, plans=True)
    with pytest.raises(ConfigError, match="redundant_slots is 0"):
        PlanningMegatronConfig(redundant_slots=0)
    padded = PlanningMegatronConfig(packing="routes", use_remove_padding=False, pad_bshd_to_minibatch_max=False)
    with pytest.raises(ConfigError, match="pad_bshd_to_minibatch_max=True"):
        require_supported_by_megatron(padded, model, replays=True, plans=True)
    with pytest.raises(ConfigError, match=r"none\.toml"):
        PlanningMegatronConfig(topology="none.toml")


@pytest.mark.shows(
    "verl, Megatron engine",
    "plans for a critic, on an NPU, or without `external_lib`",
    refused="verl takes an engine that makes none",
)
@pytest.mark.parametrize(("engine", "device"), [("MegatronEngine", "cuda"), ("MindspeedEngine", "npu")])
def test_a_worker_ends_where_verl_would_make_an_engine_that_plans_nothing(engine, device):
    """In a process that names the configuration alone, and no library of ours."""
    code = f"""
import examples.verl.verl_on_cpu
from verl.workers.engine import EngineRegistry
from foreroute.trainers.verl.planning import PlanningMegatronConfig
examples.verl.verl_on_cpu.os.environ["VERL_ENGINE_DEVICE"] = "{device}"
EngineRegistry.new("language_model", "megatron", engine_config=PlanningMegatronConfig())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert f"ConfigError: PlanningMegatronConfig asks for plans, and {engine}WithLMHead, which verl" in result.stderr


def rows_of(watched, name, which):
    """Rows [M, L] of the forwards of a pass, its recomputations left out."""
    rows_ML = watched["rows_ML"]
    if "recomputed" in name and which == "update":
        assert np.array_equal(rows_ML[::2], rows_ML[1::2])
        return rows_ML[::2]
    return rows_ML


def max_over_mean(ranks, name):
    """Over the cells of the last step's passes but those of the first micro-batch, which is at home."""
    passes = [
        np.stack([rows_of(rank[which][-1], name, which) for rank in ranks], -1)[1:] for which in ("old", "update")
    ]
    return sum(rows_MLG.max(-1).sum() for rows_MLG in passes) / sum(rows_MLG.mean(-1).sum() for rows_MLG in passes)


def routed(routes):
    return Counter(tuple(sorted(map(int, ids))) for rows in routes for ids in rows)


def picked(forwards):
    return Counter(tuple(np.flatnonzero(row).tolist()) for mask in forwards for row in mask.numpy())


def apart(a, b):
    assert a.keys() == b.keys()
    difference = sum(float(((a[name] - b[name]).double() ** 2).sum()) for name in a)
    return (difference / sum(float((a[name].double() ** 2).sum()) for name in a)) ** 0.5

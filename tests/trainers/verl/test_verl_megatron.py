"""verl's Megatron engine on two ranks that share experts: its routes, and its plans as they were executed."""

import subprocess
import sys
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
from tests.trainers.verl.verl_ranks import run_each

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


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """mbridge knows of no dense layers in Qwen3-MoE."""
    return save_policy(tmp_path_factory.mktemp("policy"), mlp_only_layers=[])


@pytest.fixture(scope="module")
def found(policy):
    return run_each(2, "megatron_worker.train", policy, RUNS)


@pytest.mark.shows("verl, Megatron engine", "`packing=routes`, with plans")
def test_sequences_share_micro_steps_by_their_routes_within_the_token_budget(found):
    """Log-probs in the order of the batch, and weights, are held against other groupings in test_verl_parallel.py."""
    by_length, by_routes = found["planned"], found["planned, by routes"]
    for step, (before, after) in enumerate(zip(by_length[0]["metrics"], by_routes[0]["metrics"], strict=True)):
        assert after["plan/imbalance_static"][0] < before["plan/imbalance_static"][0]
        for which in ("old", "update"):
            sizes, others = ([len(rows) for rows in ranks[1][which][step][0]] for ranks in (by_routes, by_length))
            assert len(sizes) == len(others)
            assert max(sizes) <= TOKENS
        # the smallest micro-steps are at both ends
        total_M = np.sum([[len(rows) for rows in rank["update"][step][0]] for rank in by_routes], axis=0)
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


def apart(a, b):
    assert a.keys() == b.keys()
    difference = sum(float(((a[name] - b[name]).double() ** 2).sum()) for name in a)
    return (difference / sum(float((a[name].double() ** 2).sum()) for name in a)) ** 0.5

"""verl's Megatron engine under each kind of parallelism: routes, masks and plans, held against data parallelism.

In float32, which verl does not accept by itself: bfloat16 hides what rounding is as large as. Of what must change no
bit two ranks that share experts are enough, in bfloat16.
"""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")
pytest.importorskip("mbridge", reason="there is no mbridge in this environment: run `make night PART=verl`")

# isort: off
from tests.trainers.verl.megatron_engines import CONTEXT, LAYERS, OF_MASKS, PIPELINE, SEQUENCES, TENSOR  # no GPU

# isort: on

from examples.verl.tiny_checkpoint import save_policy
from foreroute.errors import ConfigError
from foreroute.testing.ranks import environment
from foreroute.trainers.verl.planning import PlanningMegatronConfig
from foreroute.trainers.verl.settings import require_supported_by_megatron
from tests.trainers.verl.verl_book import Book, Scores, require_learned, require_scored
from tests.trainers.verl.verl_ranks import run_each

TOKENS = 32
"""Most of a micro-batch."""
VIRTUAL = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
PADDED, FUSED = {"use_remove_padding": False}, {"use_fused_kernels": True}
TO_A_LENGTH = {"pad_to_length": True, "pad_to_length_bucket": 64}
DEEP_EP, HYBRID_EP = (
    {"transformer": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}}
    for backend in ("deepep", "hybridep")
)
HYBRID_EP |= TO_A_LENGTH  # it wants equally many tokens of every rank
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BY_ROUTES = {"plans": True, "plan": {"packing": "routes"}}
BFLOAT16_RUNS = {
    "plain": {},
    "planned": {"plans": True},
    "planned, tolerant": {"plans": True, "plan": {"tolerance": 0.9}},
    "planned, recomputed": {"plans": True, "transformer": FULL},
    "planned, offloaded": {"plans": True, "param_offload": True, "optimizer_offload": True},
    "planned, by routes": BY_ROUTES,
    "planned, resumed": {"plans": True, "resumes": True},
}
RUNS = {
    "data": {},
    "data, larger micro-batches": {"tokens": 48},
    "data, another order": {"reverse": True},
    "data, not replayed": {"replay": "disabled"},
    "data, planned, by routes": BY_ROUTES,
    "tensor, no sequence": TENSOR | {"sequence_parallel": False},
    "tensor, planned": TENSOR | BY_ROUTES,
    "pipeline, tensor": PIPELINE | TENSOR,
    "virtual, planned": VIRTUAL | BY_ROUTES,
    "context, pipeline, fused": CONTEXT | PIPELINE | FUSED,
    "context, planned": CONTEXT | BY_ROUTES,
    "context, packed to a length": CONTEXT | TO_A_LENGTH,
    "padded alike, context, planned": PADDED | CONTEXT | {"plans": True, "pad_bshd_to_minibatch_max": True},
    "DeepEP, tensor, fused": TENSOR | DEEP_EP | FUSED,
    "HybridEP, planned": HYBRID_EP | {"plans": True},
    "DeepEP, virtual, planned": DEEP_EP | VIRTUAL | BY_ROUTES,
    "R2, virtual, planned": VIRTUAL | {"plans": True, "replay": "R2"},
}
ORDERS = ("data, larger micro-batches", "data, another order")
"""Sums of gradients that are rounded otherwise."""
CONTROL = "data, not replayed"
R2 = "R2, virtual, planned"
REPLAYED = [name for name in RUNS if name not in (CONTROL, R2)]
MASKED = {
    "context, tensor": CONTEXT | TENSOR,
    "context, packed to a length": CONTEXT | TO_A_LENGTH,
    "virtual, tensor": VIRTUAL | TENSOR,
    "padded, context, tensor": CONTEXT | TENSOR | PADDED,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """mbridge knows of no dense layers in Qwen3-MoE."""
    return save_policy(tmp_path_factory.mktemp("policy"), mlp_only_layers=[], num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def exact(policy):
    return Book(policy, count=SEQUENCES).exact()


@pytest.fixture(scope="module")
def scores(policy):
    return Scores(policy, count=OF_MASKS)


@pytest.fixture(scope="module")
def found(policy):
    runs = {name: {"dtype": "float32"} | settings for name, settings in RUNS.items()}
    return run_each(4, "megatron_engines.train", policy, runs)


@pytest.fixture(scope="module")
def masked(policy):
    return run_each(4, "megatron_engines.score", policy, MASKED | {"fused": TENSOR | FUSED})


@pytest.fixture(scope="module")
def in_bfloat16(policy):
    return run_each(2, "megatron_engines.train", policy, BFLOAT16_RUNS)


@pytest.mark.shows("verl, Megatron engine", "plans under TP, CP, PP and VPP")
@pytest.mark.parametrize("name", REPLAYED)
def test_what_is_executed_is_what_the_rollout_picked_and_log_probs_are_those_of_hugging_face(name, found, exact):
    logged = [metrics for rank in found[name] for metrics in rank["metrics"] if metrics]
    assert logged
    for metrics in logged:
        assert metrics["mismatch/disagreement"] == [0.0]
        assert metrics["mismatch/native_disagreement"][0] > 0.05
        if "planned" in name:
            assert metrics["plan/rows_off"] == [0.0]
            assert metrics["plan/imbalance_executed"][0] < metrics["plan/imbalance_static"][0]
    if "another order" not in name:
        ours = by_number([(rank["first"], rank["log_probs"][0]) for rank in found[name]], SEQUENCES)
        exact, rounding = exact
        apart = [float((one - other).abs().max()) for one, other in zip(ours, exact, strict=True)]
        assert max(apart) < 8 * rounding < 1e-4


@pytest.mark.shows("verl, Megatron engine", "tensor parallelism, with and without sequence parallelism, with EP")
@pytest.mark.shows("verl, Megatron engine", "pipeline and virtual pipeline parallelism, with EP")
@pytest.mark.shows("verl, Megatron engine", "context parallelism, with EP, TP and PP (attention is a stand-in)")
@pytest.mark.shows("verl, Megatron engine", "padding kept (`use_remove_padding=False`), `pad_to_length`")
@pytest.mark.shows("verl, Megatron engine", "`use_fused_kernels` (a stand-in for Triton's)")
@pytest.mark.shows(
    "verl, Megatron engine", "the `flex` dispatcher, with plans too, DeepEP and HybridEP (stand-ins for their kernels)"
)
@pytest.mark.parametrize("name", [name for name in REPLAYED if name not in ("data", *ORDERS)])
def test_weights_are_those_of_data_parallelism_but_for_the_order_of_sums(name, found):
    """What other routes train is ten thousand times as far."""
    weights = {name: ranks[0]["weights"] for name, ranks in found.items()}
    for rank in found[name][1:]:
        assert apart(weights[name], rank["weights"]) == 0
    order = max(apart(weights["data"], weights[other]) for other in ORDERS)
    assert apart(weights["data"], weights[name]) <= 10 * order < apart(weights["data"], weights[CONTROL]) / 1000


@pytest.mark.shows("verl, Megatron engine", "R2, with plans")
def test_r2_updates_take_the_routes_that_the_first_old_pass_took_by_itself(found):
    for rank in found[R2]:
        assert apart(rank["weights"], found[R2][0]["weights"]) == 0
        for layer, taken in rank["old"][0].items():
            for update in rank["update"]:
                assert len(update[layer]) == len(taken) > 1
                assert all(map(torch.equal, update[layer], taken))
            # the control: with other weights it takes others
            assert not all(map(torch.equal, rank["old"][-1][layer], taken))
    logged = [metrics for rank in found[R2] for metrics in rank["metrics"] if metrics]
    assert logged
    assert all(metrics["plan/rows_off"] == [0.0] for metrics in logged)
    assert not any("mismatch/disagreement" in metrics for metrics in logged)
    assert logged[0]["mismatch/native_disagreement"] == [0.0] != logged[-1]["mismatch/native_disagreement"]


def test_an_option_of_the_planner_reaches_its_plans(in_bfloat16):
    logged = zip(*(in_bfloat16[name][0]["metrics"] for name in ("planned", "planned, tolerant")), strict=True)
    for exact, tolerant in logged:
        assert tolerant["plan/replicas"][0] < exact["plan/replicas"][0]
        assert tolerant["plan/rows_off"] == [0.0]


@pytest.mark.shows("verl, Megatron engine", "`plan.packing=routes`")
def test_sequences_share_micro_steps_by_their_routes_within_the_token_budget(in_bfloat16):
    by_length, by_routes = in_bfloat16["planned"], in_bfloat16["planned, by routes"]
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
def test_recomputation_memory_of_the_host_and_a_checkpoint_change_no_bit_of_weights_under_plans(in_bfloat16):
    first = in_bfloat16["planned"][0]["weights"]
    for name in ("planned", "planned, recomputed", "planned, offloaded", "planned, resumed"):
        assert [apart(first, rank["weights"]) for rank in in_bfloat16[name]] == [0, 0], name
    assert apart(first, in_bfloat16["plain"][0]["weights"]) > 0  # the control: other sums are seen


@pytest.mark.shows(
    "verl, Megatron engine", "`top_p`, `top_k` under vLLM: scored on sampling masks, with TP, CP, PP, packed and padded"
)
@pytest.mark.shows(
    "verl, Megatron engine", "`use_fused_kernels` with sampling masks", refused="their log-probs are of all tokens"
)
@pytest.mark.parametrize("name", MASKED)
def test_on_masks_log_probs_and_gradients_are_those_of_dense_logits_and_such_past_the_logits_are_noticed(
    name, masked, scores
):
    require_scored(by_number([(rank["first"], rank["log_probs"]) for rank in masked[name]], OF_MASKS), scores)
    for rank in masked[name]:
        require_learned(rank["gradients"], by_expert(scores.gradients))
    k3 = [value for rank in masked[name] for value in rank["k3"]]
    assert k3
    assert max(k3) < 1e-9
    assert all("past its logits" in rank["refused"] for rank in masked["fused"])


@pytest.mark.shows(
    "verl, Megatron engine", "`dynamic_context_parallel`", refused="verl splits no batch into micro-batches under it"
)
@pytest.mark.shows("verl, Megatron engine", "plans without R3 or R2", refused="a plan is made of routes that are known")
def test_settings_that_replay_or_plans_do_not_go_with_are_refused():
    dynamic = PlanningMegatronConfig(dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=64)
    padded = PlanningMegatronConfig(plan={"packing": "routes"}, **PADDED, pad_bshd_to_minibatch_max=False)
    for config, replays, message in (
        (dynamic, True, "dynamic_context_parallel"),
        (PlanningMegatronConfig(), False, r"router_replay\.mode=R3"),
        (padded, True, "pad_bshd_to_minibatch_max=True"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_supported_by_megatron(config, SimpleNamespace(lora={}), replays=replays, plans=True)
    with pytest.raises(ConfigError, match="redundant_slots is 0"):
        PlanningMegatronConfig(redundant_slots=0)


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


def by_number(shares, count):
    """The rows of all sequences in order, of ranks that have some each, from a first on."""
    rows = {first + number: row for first, rows in reversed(shares) for number, row in enumerate(rows)}
    assert sorted(rows) == list(range(count))
    return [rows[number] for number in range(count)]


def by_expert(gradients):
    """Gradients of stacked experts as mbridge names them, one by one."""
    found = {}
    for name, gradient in gradients.items():
        begin, stacked, weight = name.partition(".experts.")
        for number, mine in enumerate(gradient if stacked else ()):
            parts = {weight: mine}
            if weight == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), mine.chunk(2), strict=True))
            found |= {f"{begin}{stacked}{number}.{part}.weight": half for part, half in parts.items()}
        if not stacked:
            found[name] = gradient
    return found

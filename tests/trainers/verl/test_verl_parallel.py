"""verl's Megatron engine on four ranks under each kind of parallelism, held against one kind without any of them.

In float32, which verl does not accept by itself: bfloat16 hides what rounding is as large as.
"""

import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")
pytest.importorskip("mbridge", reason="there is no mbridge in this environment: run `make night PART=verl`")

from examples.verl.tiny_checkpoint import save_policy
from tests.trainers.verl.test_verl_megatron import apart
from tests.trainers.verl.verl_book import Book
from tests.trainers.verl.verl_ranks import run_each

SEQUENCES = 16
TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
VIRTUAL = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
PADDED = {"use_remove_padding": False}
DEEP_EP, HYBRID_EP = (
    {"transformer": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}}
    for backend in ("deepep", "hybridep")
)
HYBRID_EP |= {"pad_to_length": True, "pad_to_length_bucket": 64}  # it wants equally many tokens of every rank
BY_ROUTES = {"plans": True, "packing": "routes"}
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
    "context, pipeline, fused": CONTEXT | PIPELINE | {"use_fused_kernels": True},
    "context, planned": CONTEXT | BY_ROUTES,
    "context, packed to a length": CONTEXT | {"pad_to_length": True, "pad_to_length_bucket": 64},
    "padded alike, context, planned": PADDED | CONTEXT | {"plans": True, "pad_bshd_to_minibatch_max": True},
    "DeepEP, tensor, fused": TENSOR | DEEP_EP | {"use_fused_kernels": True},
    "HybridEP, planned": HYBRID_EP | {"plans": True},
    "DeepEP, virtual, planned": DEEP_EP | VIRTUAL | BY_ROUTES,
    "R2, virtual, planned": VIRTUAL | {"plans": True, "replay": "R2"},
}
ORDERS = ("data, larger micro-batches", "data, another order")
"""Sums of gradients that are rounded otherwise."""
CONTROL = "data, not replayed"
R2 = "R2, virtual, planned"
REPLAYED = [name for name in RUNS if name not in (CONTROL, R2)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"), mlp_only_layers=[], num_hidden_layers=4)


@pytest.fixture(scope="module")
def exact(policy):
    return Book(policy, count=SEQUENCES).exact()


@pytest.fixture(scope="module")
def found(policy):
    runs = {name: {"ranks": 2, "dtype": "float32"} | settings for name, settings in RUNS.items()}
    return run_each(4, "megatron_worker.train", policy, runs)


@pytest.mark.parametrize("name", [name for name in REPLAYED if "another order" not in name])
def test_log_probs_are_those_of_hugging_face_on_the_same_routes(name, found, exact):
    ours = {}
    for rank in found[name]:
        for number, row in enumerate(rank["log_probs"][0]):
            ours.setdefault(rank["first"] + number, row)
    exact, rounding = exact
    assert sorted(ours) == list(range(SEQUENCES))
    assert max(float((ours[s] - exact[s]).abs().max()) for s in ours) < 8 * rounding < 1e-4


@pytest.mark.shows("verl, Megatron engine", "plans under TP, CP, PP and VPP")
@pytest.mark.parametrize("name", REPLAYED)
def test_what_is_executed_is_what_the_rollout_picked(name, found):
    logged = [metrics for rank in found[name] for metrics in rank["metrics"] if metrics]
    assert logged
    for metrics in logged:
        assert metrics["mismatch/disagreement"] == [0.0]
        assert metrics["mismatch/native_disagreement"][0] > 0.05
        if "planned" in name:
            assert metrics["plan/rows_off"] == [0.0]
            assert metrics["plan/imbalance_executed"][0] < metrics["plan/imbalance_static"][0]


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

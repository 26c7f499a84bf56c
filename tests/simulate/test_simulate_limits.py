"""What a small file may ask of a simulation: a bounded amount of memory, and no numbers that overflow."""

import tracemalloc
import warnings

import numpy as np
import pytest

from foreroute.errors import ConfigError, InputError
from foreroute.plan import save_counts
from foreroute.simulate import parse_config, simulate
from tests.simulate.simulate_cases import small_config

CLUSTER = {"cluster": {"gpus": 64, "expert_parallel": 16}}
WIDE = {"num_experts": 32_768, "num_layers": 1000}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workload": {"micro_steps": 999_999}}, "would take about .* GB of memory; expected at most 2 GB"),
        ({"workload": {"layers": 48, "groups": 999_999, "micro_steps": 5000}}, "would take about .* GB of memory"),
        ({"cluster": {"gpus": 1024, "expert_parallel": 1024}, "model": WIDE}, "would take about .* GB of memory"),
        ({"cluster": {"gpus": 64, "expert_parallel": 64, "redundant_slots": 2000}}, "redundant_slots"),
        (
            {"cluster": {"gpus": 999_999, "expert_parallel": 1}, "workload": {"groups": 999_999}},
            "would take about .* GB",
        ),
        ({"cluster": {"gpus": 2**40, "expert_parallel": 16}}, r"cluster\.gpus: .*less than or equal to 999999"),
        ({"cluster": {"gpus": 65536, "expert_parallel": 65536}}, r"cluster\.expert_parallel: .*or equal to 1024"),
        ({"workload": {"tokens_per_rank": 2**24}}, "assignments in a cell; expected 2147483647 at most"),
        ({"workload": {"skew": 1e30}}, r"workload\.skew"),
        ({"execution": {"rollout_s": 1e300}}, r"execution\.rollout_s"),
        ({"links": {"node_latency_s": 1e300}}, r"node_latency_s is 1e\+300; expected"),
    ],
)
def test_what_would_take_too_much_is_refused_before_it_is_taken(values, message):
    usual = {"hardware": {"preset": "h100"}, "model": {"preset": "qwen3-30b-a3b"}, **CLUSTER}
    asked = {name: {**usual.get(name, {}), **values.get(name, {})} for name in {*usual, *values}}
    tracemalloc.start()
    with pytest.raises(InputError, match=message):
        simulate(parse_config(asked, source="here"))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_the_largest_that_anyone_simulates_is_let_through():
    values = {
        "cluster": {"gpus": 4096, "expert_parallel": 64},
        "model": {"preset": "deepseek-v3"},
        "workload": {"layers": 58, "micro_steps": 32, "groups": 1},
    }
    parse_config(values, source="here")
    parse_config(
        {**values, "cluster": {"gpus": 2048, "expert_parallel": 256}, "workload": {"layers": 4}}, source="here"
    )


def test_counts_from_a_file_are_bounded_like_drawn_ones(tmp_path):
    save_counts(np.zeros((200_000, 1, 1, 2), np.int8), tmp_path / "counts.safetensors")
    values = small_config(experts=2, gpus=1, expert_parallel=1).model_dump()
    values["workload"] = {"counts": str(tmp_path / "counts.safetensors")}
    values["model"] |= {"num_layers": 1000, "top_k": 1}
    with pytest.raises(ConfigError, match=r"counts\.safetensors.*GB"):
        simulate(parse_config(values, source="here"))


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("links", dict.fromkeys(("node_bytes_per_s", "cluster_bytes_per_s", "host_bytes_per_s"), 1e6)),
        ("links", dict.fromkeys(("node_bytes_per_s", "cluster_bytes_per_s", "host_bytes_per_s"), 1e18)),
        ("links", dict.fromkeys(("node_latency_s", "cluster_latency_s"), 0.01)),
        ("hardware", dict.fromkeys(("gemm_flops_per_s", "attention_flops_per_s", "memory_bytes_per_s"), 1e6)),
        ("hardware", {"gemm_flops_per_s": 1e24, "layer_s": 0.01, "tile_rows": 1_000_000}),
        ("model", {"hidden": 1 << 20, "intermediate": 1 << 20, "vocabulary": 1 << 24, "dense_parameters": 1 << 40}),
        ("model", {"weight_bytes": 8.0, "gradient_bytes": 8.0, "activation_bytes": 8.0, "num_layers": 1024}),
        ("execution", {"planning_s": 604_800.0, "rollout_s": 604_800.0, "plan_lead_s": 604_800.0}),
        ("costs", {"prefetch": 999_999}),
        ("workload", {"skew": 1000.0}),
        ("workload", {"skew": 0.001}),
        ("cluster", {"redundant_slots": 128}),
    ],
)
def test_whatever_is_allowed_gives_finite_figures(table, values):
    given = small_config().model_dump()
    given[table] = {**given[table], **values}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = simulate(parse_config(given, source="here"))
    for method in found.methods:
        assert np.isfinite([method.training_s, method.step_s, method.share_of_forced_balance, method.gpu_hours]).all()
        assert method.training_s > 0

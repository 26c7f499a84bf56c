"""What a small file may ask of a simulation: a bounded amount of memory, and no numbers that overflow."""

import tracemalloc
import warnings

import numpy as np
import pytest

from foreroute.errors import InputError
from foreroute.simulate import parse_config, simulate
from tests.simulate.simulate_cases import small_config

CLUSTER = {"cluster": {"gpus": 64, "expert_parallel": 16}}
WIDE = {"num_experts": 32_768, "num_layers": 1000}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workload": {"micro_steps": 999_999}}, "would take about .* GB of memory; expected at most 2 GB"),
        ({"cluster": {"gpus": 1024, "expert_parallel": 1024}, "model": WIDE}, "would take about .* GB of memory"),
        ({"cluster": {"gpus": 64, "expert_parallel": 64, "redundant_slots": 2000}}, "redundant_slots"),
        ({"cluster": {"gpus": 2**40, "expert_parallel": 16}}, r"cluster\.gpus: .*less than or equal to 999999"),
        ({"workload": {"tokens_per_rank": 2**24}}, "assignments in a cell; expected 2147483647 at most"),
        ({"execution": {"rollout_s": 1e300}}, r"execution\.rollout_s"),
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


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("links", dict.fromkeys(("node_bytes_per_s", "cluster_bytes_per_s", "host_bytes_per_s"), 1e6)),
        ("hardware", dict.fromkeys(("gemm_flops_per_s", "attention_flops_per_s", "memory_bytes_per_s"), 1e6)),
        ("hardware", {"gemm_flops_per_s": 1e24, "layer_s": 0.01, "tile_rows": 1_000_000}),
        ("model", {"hidden": 1 << 20, "intermediate": 1 << 20, "vocabulary": 1 << 24, "dense_parameters": 1 << 40}),
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

"""What docs/sizing.md says that a trace takes, in memory and in a file, is what it takes."""

import pytest

import foreroute as fr
from foreroute.costs.presets import model_preset
from foreroute.testing.routes import synthetic_trace
from tests.tiers import grid


@grid("name", ["qwen3-30b-a3b", "qwen3-235b-a22b"], quick=1)
def test_a_token_takes_the_bytes_that_the_page_says(name, tmp_path):
    model = model_preset(name)
    spec = fr.RoutingSpec(model.num_experts, model.top_k, tuple(fr.RoutedLayer(i) for i in range(model.num_layers)))
    trace = synthetic_trace(spec, [1000, 1000], seed=0)
    arrays = (trace.expert_ids_NLK, trace.token_ids_N, trace.weight_versions_N, trace.valid_N)
    assert sum(array.nbytes for array in arrays) == trace.num_rows * (model.num_layers * model.top_k + 9)
    stored = fr.save(trace, tmp_path / "trace.safetensors").stat().st_size / trace.num_rows
    assert stored == pytest.approx(5.2 * model.num_layers, rel=0.05)

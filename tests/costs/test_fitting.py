"""The finder of rates: it finds those that made the seconds, a least sum of squares where none did, and its limits."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.costs.fitting import find_rates, require_distinct_effects, value_of, with_values
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.errors import ConfigError

COSTS = CostModel(
    model=MODELS["qwen3-30b-a3b"],
    hardware=replace(HARDWARE["h100"], replica_s=1e-4, replica_backward_s=2e-4),
)
NAMES = ("gemm_flops_per_s", "node_bytes_per_s", "layer_s", "backward_products", "replica_s")
TIME = {"gemm_flops_per_s": 1e12, "node_bytes_per_s": 1e9}
"""What of each rate is done in a unit of work; parameters that are no rates count as they are."""


def paths_of(seed, num=14, paths=3):
    """Seconds as the slowest of some paths of work, each linear in what time is proportional to."""
    weight_VPK = np.random.default_rng(seed).gamma(0.5, size=(num, paths, len(NAMES)))

    def predicted(costs):
        value_K = [value_of(costs.hardware, name) for name in NAMES]
        cost_K = [TIME[n] / v if n in TIME else v for n, v in zip(NAMES, value_K, strict=True)]
        begin_K = [TIME[n] / value_of(COSTS.hardware, n) if n in TIME else value_of(COSTS.hardware, n) for n in NAMES]
        return (weight_VPK @ (np.array(cost_K) / begin_K)).max(axis=1)

    return predicted


def found_again(seed, factors, paths):
    """Whether parameters that are these factors of what is configured are found by the seconds that they make."""
    predicted = paths_of(seed, paths=paths)
    truth = {name: float(f) * value_of(COSTS.hardware, name) for name, f in zip(NAMES, factors, strict=True)}
    measured_V = predicted(with_values(COSTS, truth))
    found = find_rates(COSTS, NAMES, predicted, measured_V, measured_V).costs
    values = [value_of(found.hardware, name) for name in NAMES]
    return np.allclose(predicted(found), measured_V, rtol=1e-6) and np.allclose(values, [*truth.values()], rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), factors=st.lists(st.floats(0.05, 20), min_size=5, max_size=5))
def test_parameters_that_made_the_seconds_are_found(seed, factors):
    assert found_again(seed, factors, paths=1)


@pytest.mark.parametrize(
    ("share_VK", "words"),
    [
        ([[1.0, 0.0], [2.0, 1e-12]], "depends on layer_s"),
        ([[1.0, 2.0], [2.0, 4.0 + 1e-9]], "cannot tell gemm_flops_per_s, layer_s apart"),
    ],
)
def test_parameters_without_effects_of_their_own_are_refused(share_VK, words):
    names = ("gemm_flops_per_s", "layer_s")
    with pytest.raises(ConfigError, match=words):
        require_distinct_effects(np.array(share_VK), names)
    require_distinct_effects(np.array([[1.0, 1e-6], [2.0, 0.0]]), names)

"""Canaries: every route names its place, whatever E and K are, and what is no canary says so."""

from math import comb

import numpy as np
import pytest

from foreroute.errors import TraceContentError
from tests.layout.canary import canary_capacity, canary_trace
from tests.traces import spec_of


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(64, 1), (8, 4), (20, 2), (60, 4), (128, 8), (256, 8), (512, 10), (65536, 3), (16, 15)]
)
def test_every_route_names_its_sample_position_and_layer(num_experts, top_k):
    spec = spec_of(num_experts=num_experts, top_k=top_k, num_layers=2)
    lengths = [3, 1, 0, 4] if num_experts != 16 else [2, 1, 0, 4]
    canary = canary_trace(lengths, spec, last_absent=False)
    seen = canary.decode(canary.trace.expert_ids_NLK[..., ::-1])
    expected = [[[s, p, layer] for layer in range(2)] for s, n in enumerate(lengths) for p in range(n)]
    assert seen.tolist() == expected


def test_what_is_no_canary_decodes_to_nothing():
    canary = canary_trace([3, 2], spec_of(num_experts=64, top_k=3), last_absent=False)
    assert canary.stride > 1
    for picks in ([0, 0, 1], [64, 1, 2], [-1, 1, 2], [61, 62, 63]):
        assert canary.decode(picks).tolist() == [-1, -1, -1]


def test_random_routes_are_seldom_canaries():
    canary = canary_trace([30, 20], spec_of(num_experts=512, top_k=10))
    rng = np.random.default_rng(0)
    picks = np.argsort(rng.random((500, 512)), axis=-1)[:, :10]
    assert (canary.decode(picks) == -1).all()


def test_capacity_is_the_number_of_sets_and_is_refused_beyond():
    spec = spec_of(num_experts=8, top_k=2, num_layers=2)
    assert canary_capacity(spec) == comb(8, 2) == 28
    assert canary_trace([14], spec, last_absent=False).decode(np.array([6, 7])).tolist() == [0, 13, 1]
    with pytest.raises(TraceContentError, match="15 rows of 2 layers need 30 codes; 2 of 8 experts make 28"):
        canary_trace([15], spec)
    assert canary_capacity(spec_of(num_experts=512, top_k=20)) == 2**61

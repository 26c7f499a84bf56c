"""Padded batches into a trace and back, by the one rule for -1; arrays of numpy, and tensors of torch as they come."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from foreroute.checks import host_array
from foreroute.errors import TraceContentError
from tests.traces import random_trace, spec_of

torch = pytest.importorskip("torch")
from foreroute.testing.counting_device import DEVICE, other_device  # noqa: E402 it imports torch


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    experts=st.sampled_from([3, 257, 40_000]),
    library=st.sampled_from(["numpy", "torch"]),
)
def test_a_batch_comes_back_as_it_was(seed, experts, library):
    """Padding anywhere; row by row, beside what a loop takes out of the batch."""
    rng = np.random.default_rng(seed)
    trace = random_trace(seed, num_experts=experts).with_weight_version(4)
    width = int(trace.lengths.max()) + 2
    mask = rng.permuted(np.arange(width) < trace.lengths[:, None], axis=1)
    tokens, routes, kept = trace.to_padded(mask)
    assert np.array_equal(kept, mask)
    assert (tokens.dtype, routes.dtype) == (np.int32, np.int16 if experts <= 2**15 else np.int32)
    assert (routes[~mask] == -1).all()
    for n, (b, t) in enumerate(np.argwhere(mask).tolist()):
        recorded = bool((routes[b, t] >= 0).all())
        assert (tokens[b, t], recorded) == (trace.token_ids_N[n], trace.valid_N[n])
        assert routes[b, t].tolist() == (trace.expert_ids_NLK[n].tolist() if recorded else np.full((3, 2), -1).tolist())
    given_batch = tokens.astype(np.int64), routes, mask.astype(rng.choice(["bool", "int64", "float32"]))
    if library == "torch":
        given_batch = tuple(map(torch.from_numpy, given_batch))
    assert fr.RoutingTrace.from_padded(trace.spec, *given_batch, weight_version=4).equals(trace)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_ids_BT": [1, 2], "attention_mask": None}, r"token_ids has shape \(2,\)"),
        ({"expert_ids_BTLK": np.zeros((1, 2, 1, 2), int)}, r"expert_ids \(1, 2, 1, 2\).*append a row of -1"),
        ({"expert_ids_BTLK": np.zeros((1, 3, 1, 2), int)}, r"picked twice; .*zeros"),
        ({"expert_ids_BTLK": np.ones((1, 3, 1, 2))}, "expected integers"),
        ({"attention_mask": [[1, 1, 2]]}, r"bools, .*0 and 1"),
        ({"attention_mask": [4]}, r"attention_mask hold 4; .*0 to 3"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(changed, message):
    good = {"token_ids_BT": [[1, 2, 3]], "expert_ids_BTLK": [[[[0, 1]]] * 3], "attention_mask": [3]}
    assert fr.RoutingTrace.from_padded(spec_of(num_layers=1), **good).num_rows == 3
    with pytest.raises(TraceContentError, match=message):
        fr.RoutingTrace.from_padded(spec_of(num_layers=1), **{**good, **changed})


def test_a_tensor_comes_as_an_array_without_its_gradient_and_its_bfloat16():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = host_array(torch.tensor([0.5, 1.0, -2.0], dtype=dtype, requires_grad=True)[::2])
        assert (type(found), found.tolist()) == (np.ndarray, [0.5, -2.0])


def test_a_tensor_is_taken_from_its_device():
    with other_device():
        tokens, routes = torch.tensor([[5, 6]]).to(DEVICE), torch.tensor([[[[0, 1]], [[2, 3]]]]).to(DEVICE)
        with pytest.raises(RuntimeError, match="not supported"):
            np.asarray(routes)
        trace = fr.RoutingTrace.from_padded(spec_of(num_layers=1), tokens, routes)
    assert trace.expert_ids_NLK.tolist() == [[[0, 1]], [[2, 3]]]

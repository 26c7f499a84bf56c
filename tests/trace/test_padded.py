"""Padded batches into a trace and back, by the one rule for -1; arrays of numpy, and tensors of torch as they come."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foreroute as fr
from foreroute.checks import host_array
from foreroute.errors import TraceContentError
from tests.traces import spec_of

torch = pytest.importorskip("torch")
from foreroute.testing.counting_device import DEVICE, other_device  # noqa: E402 it imports torch

WIDE = ["int16", "int32", "int64"]


@st.composite
def batches(draw):
    """A model, and a padded batch with tokens, routes of which some are gaps, and a mask with padding anywhere."""
    experts = draw(st.sampled_from([3, 256, 257, 40_000]))
    top_k, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = draw(st.integers(0, 4)), draw(st.integers(0, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kept, gap = rng.random((2, *shape)) < [[[0.7]], [[0.3]]]
    side = draw(st.sampled_from(["left", "right", "anywhere"]))
    kept = kept if side == "anywhere" else np.sort(kept, axis=1)[:, :: 1 if side == "left" else -1]
    routes = rng.integers(0, experts - top_k + 1, (*shape, layers, 1)) + np.arange(top_k)
    routes[gap | ~kept] = -1
    tokens = np.where(kept, rng.integers(0, 50, shape), 0)
    spec = fr.RoutingSpec(experts, top_k, tuple(map(fr.RoutedLayer, range(layers))))
    return spec, tokens, routes, kept


@given(batches(), st.sampled_from(["numpy", "torch"]), st.data())
def test_a_batch_comes_back_as_it_was(batch, library, data):
    spec, tokens, routes, kept = batch
    dtype = data.draw(st.sampled_from(WIDE if spec.num_experts < 2**15 else WIDE[1:]))
    given_routes, given_tokens = routes.astype(dtype), tokens.astype(data.draw(st.sampled_from(WIDE)))
    mask = kept.astype(data.draw(st.sampled_from(["bool", "int64", "float32"])))
    if library == "torch":
        given_routes, given_tokens, mask = map(torch.from_numpy, (given_routes, given_tokens, mask))
    trace = fr.RoutingTrace.from_padded(spec, given_tokens, given_routes, mask, weight_version=4)
    back = trace.to_padded(mask)
    assert np.array_equal(back.token_ids_BT, tokens)
    assert np.array_equal(back.expert_ids_BTLK, routes)
    assert np.array_equal(back.attention_mask_BT, kept)
    assert back.token_ids_BT.dtype == np.int32
    assert back.expert_ids_BTLK.dtype == (np.int16 if spec.num_experts <= 2**15 else np.int32)
    assert back.attention_mask_BT.dtype == np.bool_
    # row by row, beside what a loop takes out of the batch
    rows = [(b, t) for b in range(len(kept)) for t in range(kept.shape[1]) if kept[b, t]]
    assert trace.lengths.tolist() == kept.sum(axis=1).tolist()
    for n, (b, t) in enumerate(rows):
        recorded = bool((routes[b, t] >= 0).all())
        assert (trace.token_ids_N[n], trace.valid_N[n]) == (tokens[b, t], recorded)
        assert trace.expert_ids_NLK[n].tolist() == (
            routes[b, t].tolist() if recorded else np.zeros_like(routes[b, t]).tolist()
        )
    assert set(trace.weight_versions_N[trace.valid_N]) <= {4}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_ids_BT": [1, 2], "attention_mask": None}, r"token_ids has shape \(2,\)"),
        ({"expert_ids_BTLK": np.zeros((1, 2, 1, 2), int)}, r"expert_ids \(1, 2, 1, 2\).*append a row of -1"),
        ({"expert_ids_BTLK": np.zeros((1, 3, 1, 2), int)}, "an expert is picked twice; a row of zeros is no route"),
        ({"expert_ids_BTLK": np.ones((1, 3, 1, 2))}, "expected integers"),
        ({"attention_mask": [[1, 1, 2]]}, "expected bools, or 0 and 1 alone"),
        ({"attention_mask": [4]}, "lengths in attention_mask hold 4; expected whole numbers from 0 to 3"),
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

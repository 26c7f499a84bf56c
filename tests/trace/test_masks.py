"""Routes given as masks over experts are the sets that they were made from."""

import numpy as np
import pytest

from foreroute.errors import TraceContentError
from foreroute.trace import from_masks
from tests.traces import random_trace


def masks_of(trace):
    masks = np.zeros((trace.num_rows, trace.spec.num_layers, trace.spec.num_experts), bool)
    np.put_along_axis(masks, trace.expert_ids_NLK.astype(int), True, axis=-1)
    return [masks[a:b][trace.valid_N[a:b]] for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [bool, np.int8, np.float32])
def test_a_trace_goes_through_masks(seed, dtype):
    trace = random_trace(seed)
    tokens = [trace.tokens(s) for s in range(len(trace))]
    back = from_masks(trace.spec, tokens, [mask.astype(dtype) for mask in masks_of(trace)], weight_version=7)
    ordered = np.sort(trace.expert_ids_NLK, axis=-1)
    assert np.array_equal(back.expert_ids_NLK[trace.valid_N], ordered[trace.valid_N])
    assert np.array_equal(back.valid_N, trace.valid_N)
    assert not back.pick_order_kept
    assert set(back.versions) <= {7}


def test_what_is_no_mask_is_refused():
    trace = random_trace(1)
    tokens, masks = [trace.tokens(s) for s in range(len(trace))], masks_of(trace)
    s = max(range(len(masks)), key=lambda i: len(masks[i]))
    for change, said in [
        (lambda mask: mask.astype(float) * 0.5, "not scores"),
        (lambda mask: mask[:, :, :-1], "expected"),
        (lambda mask: mask | True, "picks 8 experts; expected 2"),
        (lambda mask: mask & False, "picks 0 experts"),
    ]:
        wrong = [change(mask) if i == s else mask for i, mask in enumerate(masks)]
        with pytest.raises(TraceContentError, match=said):
            from_masks(trace.spec, tokens, wrong)

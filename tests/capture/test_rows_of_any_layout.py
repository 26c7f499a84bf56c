"""Routes of any integer type and memory layout, with masks, gaps and faults, against rows that Python picks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from foreroute.capture import decode
from foreroute.errors import CaptureError

torch = pytest.importorskip("torch")

TYPES = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
MODELS = [(16, 3), (128, 8), (200, 8), (256, 8), (300, 8), (300, 1)]
LAYOUTS = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "every second row": lambda rows: np.repeat(rows, 2, axis=0)[::2],
    "from the end": lambda rows: np.ascontiguousarray(rows[::-1])[::-1],
    "big-endian": lambda rows: rows.astype(rows.dtype.newbyteorder(">")),
    "flat": lambda rows: rows.reshape(len(rows), -1),
}
INDICES = {"neighbours": (1, 2, 3), "apart": (1, 3, 4)}  # of routed layers among five


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_decode_takes_the_rows_that_python_picks(data, seed):
    rng, draw = np.random.default_rng(seed), data.draw
    experts, top_k = draw(st.sampled_from(MODELS))
    indices = draw(st.sampled_from(list(INDICES.values())))
    spec = fr.RoutingSpec(experts, top_k, tuple(map(fr.RoutedLayer, indices)))
    dtype = draw(st.sampled_from([each for each in TYPES if np.iinfo(each).max >= experts - 1]))
    start, count = draw(st.integers(0, 4)), draw(st.integers(1, 9))
    rows = np.argsort(rng.random((count, 3, experts)), axis=-1)[..., :top_k]
    # one pick without a sign has no -1, and of a model without a choice zeros may be a failed capture
    is_missing = (rng.random(count) < 0.3) & (top_k > 1)
    valid = rng.random(count) < draw(st.sampled_from([0.5, 1.0]))
    if draw(st.booleans()):
        # the last three would be experts in a narrower type
        wrongs = experts, rows[0, 0, 0], 1 << 8, 1 << 16, (1 << 16) - (1 << 32)
        bounds = np.iinfo(dtype)
        wrong = draw(st.sampled_from([each for each in wrongs if bounds.min <= each <= bounds.max]))
        rows[draw(st.integers(0, count - 1)), draw(st.integers(0, 2)), draw(st.integers(0, top_k - 1))] = wrong
    is_routed = valid & ~is_missing
    is_wrong = [
        len({*ids}) < top_k or max(ids) >= experts or min(ids) < 0 for row in rows[is_routed].tolist() for ids in row
    ]
    given = rows.copy()
    given[is_missing] = -1
    if draw(st.booleans()):  # all layers
        given = np.insert(given, np.searchsorted(indices, np.setdiff1d(np.arange(5), indices)), 0, axis=1)
    given = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](given.astype(dtype))
    tokens = np.arange(start + count + 1)

    def read():
        return decode(given, model=spec, token_ids=tokens, valid=valid, start=start)

    if any(is_wrong) or not is_routed.any():
        with pytest.raises(CaptureError):
            read()
        return
    trace = read()
    assert trace.valid_N.tolist() == [False] * start + is_routed.tolist() + [False]
    assert trace.expert_ids_NLK.dtype == spec.id_dtype
    assert trace.expert_ids_NLK.tolist() == [
        row if there else np.zeros((3, top_k), int).tolist()
        for row, there in zip([None] * start + rows.tolist() + [None], trace.valid_N, strict=True)
    ]

"""Checks of routes where they enter, once (shapes, ranges, distinct picks), and the arithmetic of offsets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import as_array
from foreroute.errors import TraceContentError
from foreroute.kernels import BOOL, INT, NONE, ArrayOf, compiled
from foreroute.trace.spec import ID_TYPES, RoutedLayer, RoutingSpec

MISSING = -1
"""Id in a row that was not recorded, where routes come in and go out as arrays."""
PUT_AT_ONCE = 1 << 18
"""Bytes of routes that are looked at and then copied, so that they are read from memory once."""
TAKEN_AT_ONCE = 1 << 18
"""Numbers whose places are worked out together; a place takes 16 bytes meanwhile."""
are_sets_of_eight = compiled("are_sets_of_eight", ArrayOf(np.uint64, 2), ArrayOf(np.bool_, 1), INT, returns=BOOL)
_first_bad_picks = {
    dtype: compiled(f"first_bad_picks_{dtype}", ArrayOf(dtype, 3), ArrayOf(np.int64, 1), INT, returns=INT)
    for dtype in ID_TYPES
}


def check_rows(
    expert_ids_NLK: NDArray[Any],  # of `spec.id_dtype`, [N, L, K]
    valid_N: NDArray[np.bool_],  # [N]; rows where it is False are not looked at
    offsets: NDArray[np.int64],  # [S + 1], to name the sequence of a bad row
    spec: RoutingSpec,  # E and K of each layer
) -> None:
    """Raise `TraceContentError` unless every routed row holds K distinct ids below E, and fillers behind them."""
    # ids are checked here alone, in a compiled loop that looks at each once
    if spec.top_k == 8 and spec.id_dtype == np.uint8 and not spec.sizes:
        picks_NL = np.ascontiguousarray(expert_ids_NLK).view(np.uint64)[..., 0]
        if are_sets_of_eight(picks_NL, np.ascontiguousarray(valid_N), spec.num_experts):
            return
    rows = np.flatnonzero(valid_N)
    for num_experts, top_k, at in spec.layers_by_size:
        ids, layers = expert_ids_NLK[:, at, :top_k], np.arange(spec.num_layers)[at]
        found = _first_bad_picks[ids.dtype](np.ascontiguousarray(ids), rows, num_experts)
        if found != NONE:
            row, layer = divmod(found, len(layers))
            why = f"expected ids from 0 to {num_experts - 1}"
            if ids[row, layer].max() < num_experts:
                why = "an expert is picked twice; a row of zeros is no route"
            raise _refusal(row, ids[row, layer], offsets, spec.layers[layers[layer]], why)
    if spec.sizes:
        wrong_NL = ((expert_ids_NLK != spec.filler) & ~spec.is_pick_LK).any(axis=-1) & valid_N[:, None]
        for row, layer in np.argwhere(wrong_NL)[:1]:
            why = f"expected {spec.filler} in each column behind the picks of the layer"
            raise _refusal(row, expert_ids_NLK[row, layer], offsets, spec.layers[layer], why)


def recorded_rows(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Say which rows of routes [..., L, K] do not hold `MISSING` in every layer and pick: bool [...]."""
    if ids.dtype.kind not in "iu" or (ids.dtype.kind == "u" and ids.shape[-1] < 2):
        return np.ones(ids.shape[:-2], np.bool_)
    # In a type without a sign this is the highest number, as a cast makes it: no row of two picks has it twice.
    missing_id = np.array(MISSING).astype(ids.dtype)
    # the first pick of a row tells nearly always
    missing = (ids[..., :1, :1] == missing_id).all(axis=(-2, -1))
    missing[missing] = (ids[missing] == missing_id).all(axis=(-2, -1))
    return np.asarray(~missing)


def put_ids(
    ids_RLK: NDArray[Any],  # of any type
    valid_R: NDArray[np.bool_],  # made False where a row is `MISSING`; others hold anything where it is False already
    out_RLK: NDArray[Any],  # of `spec.id_dtype`, written where a row is valid
    spec: RoutingSpec,
    *,
    name: str,
) -> None:
    """Write the rows of a sequence where a trace has them, refusing what `narrow_ids` does."""
    if spec.sizes or ids_RLK.shape[1:] != out_RLK.shape[1:] or ids_RLK.dtype.kind not in "iu":
        valid_R &= recorded_rows(ids_RLK)
        out_RLK[valid_R] = narrow_ids(ids_RLK[valid_R], spec, name=name)
        return
    # without a sign, a number below 0 is one above all experts
    unsigned = ids_RLK.view(ids_RLK.dtype.str.replace("i", "u"))
    may_leave = spec.num_experts <= np.iinfo(unsigned.dtype).max
    step = max(1, PUT_AT_ONCE // max(1, unsigned[:1].nbytes))
    # where a capture skipped a known prefix, the memory of its rows stays untouched
    for first in range(int(valid_R.argmax()) if valid_R.any() else len(valid_R), len(valid_R), step):
        here = slice(first, first + step)
        kept = valid_R[here]
        part = unsigned[here] if kept.all() else unsigned[here][kept]
        if not may_leave or part.max(initial=0) >= spec.num_experts:  # only so can a row be one of -1
            kept &= recorded_rows(ids_RLK[here])
            part = unsigned[here][kept]
            if may_leave and part.max(initial=0) >= spec.num_experts:
                narrow_ids(ids_RLK[valid_R & recorded_rows(ids_RLK)], spec, name=name)  # raises, with the whole range
        if len(part) == len(kept):
            out_RLK[here] = part
        else:
            out_RLK[here][kept] = part


def narrow_ids(ids: ArrayLike, spec: RoutingSpec, *, name: str) -> NDArray[Any]:
    """Return `ids` as `spec.id_dtype` [R, L, K], refusing anything that would not survive the cast."""
    array = as_array(ids, name=name)
    expected = (spec.num_layers, spec.top_k)
    if array.ndim != 3 or array.shape[1:] != expected:
        raise TraceContentError(
            f"{name} has shape {array.shape}; expected [rows, {expected[0]} layers, {expected[1]} picks]"
        )
    if array.dtype.kind not in "iu":
        raise TraceContentError(f"{name} has dtype {array.dtype}; expected integers")
    picks = array[:, spec.is_pick_LK] if spec.sizes else array
    if picks.size and (int(picks.min()) < 0 or int(picks.max()) >= spec.num_experts):
        raise TraceContentError(
            f"{name} holds ids from {int(picks.min())} to {int(picks.max())}; "
            f"expected 0 to {spec.num_experts - 1}, or {MISSING} in every layer and pick of a row that was not recorded"
        )
    narrow = array.astype(spec.id_dtype, copy=bool(spec.sizes))
    if spec.sizes:
        behind = np.array(MISSING).astype(array.dtype)
        if (array[:, ~spec.is_pick_LK] != behind).any():
            raise TraceContentError(
                f"{name} has ids in columns that a layer does not have, of {spec.routing} experts; expected {behind} "
                f"behind its picks, {MISSING} in a type with a sign"
            )
        narrow[:, ~spec.is_pick_LK] = spec.filler
    return narrow


def ascending(offsets: NDArray[Any], upto: int) -> bool:
    """Say whether `offsets` are integers that go from 0 to `upto` and never fall."""
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
        return False
    # Neighbours are compared and not subtracted: differences of 64-bit numbers wrap, and numpy's `repeat` writes out of
    # bounds when the sum of its counts does. Whatever comes from outside as offsets passes here first.
    return bool(offsets[0] == 0 and offsets[-1] == upto and (offsets[1:] >= offsets[:-1]).all())


def as_offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the running sum of lengths from 0, int64 [S + 1]; negative ones, and sums of 2^63 or more, are refused."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    if (offsets[1:] < offsets[:-1]).any():  # a sum of lengths from 0 that wraps becomes negative at once
        raise TraceContentError("lengths must be 0 or more, and add up to less than 2^63")
    return offsets


def join_ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64], dtype: Any = np.int64) -> NDArray[Any]:
    """Return the integers `starts[i] : starts[i] + lengths[i]` for i = 0, 1, …, joined."""
    before = as_offsets(lengths)
    joined: NDArray[Any] = np.repeat((starts - before[:-1]).astype(dtype), lengths)
    joined += np.arange(before[-1], dtype=dtype)
    return joined


def take_ranges(values: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[Any]:
    """Return `values[join_ranges(starts, lengths)]`, and never hold more than a part of that index."""
    before = as_offsets(lengths)
    taken = np.empty(int(before[-1]), values.dtype)
    parts = np.searchsorted(before, np.arange(0, len(taken), TAKEN_AT_ONCE))
    for first, after in pairwise(np.unique(np.append(parts, len(lengths))).tolist()):
        taken[before[first] : before[after]] = values[join_ranges(starts[first:after], lengths[first:after])]
    return taken


def place_of(row: int, offsets: NDArray[np.int64]) -> tuple[int, int]:
    """Return the sequence of a packed row, and its position there; `offsets` are int64 [S + 1]."""
    sequence = int(np.searchsorted(offsets, row, side="right")) - 1
    return sequence, int(row - offsets[sequence])


def _refusal(
    row: int, ids_K: NDArray[Any], offsets: NDArray[np.int64], layer: RoutedLayer, why: str
) -> TraceContentError:
    """Make the error for a row of one layer, with its place and its ids."""
    sequence, position = place_of(row, offsets)
    return TraceContentError(
        f"sequence {sequence}, position {position}, {layer} has expert ids {ids_K.tolist()}: {why}"
    )

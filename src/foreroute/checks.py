"""Checks that values from outside are numbers and arrays as needed. Each check raises the `error` that it is told."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import InputError, TraceContentError, shown

MOST_INT32 = (1 << 31) - 1
UNITS = {
    "_bytes_per_s": "bytes per second (1 GB/s is 1e9)",
    "_flops_per_s": "FLOPs per second (1 TFLOP/s is 1e12)",
    "_s": "seconds (1 µs is 1e-6)",
    "_s_per_count": "seconds (1 ns is 1e-9)",
    "_bytes": "bytes (bfloat16 has 2)",
}
"""Endings of figures' names, and the unit that each expects."""


def is_whole(value: object) -> TypeGuard[int]:
    """Say whether a value is an integer of Python or numpy, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def whole_number(
    value: object, *, name: str, least: int = 1, most: int, error: type[InputError] = TraceContentError
) -> int:
    """Return an integer from `least` to `most` as one of Python; fractions, texts and truth values are not cast."""
    if not is_whole(value) or not least <= value <= most:
        raise error(f"{name} is {shown(value)}; expected a whole number from {least} to {most}")
    return int(value)


def check_number(
    value: object,
    *,
    name: str,
    least: float = 0,
    most: float = math.inf,
    below: float | None = None,
    error: type[InputError],
) -> None:
    """Refuse what is no number from `least` to `most`, above 0; or, with `below`, from 0 to below that."""
    unit = next((f"{unit}, " for ending, unit in UNITS.items() if name.endswith(ending)), "")
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise error(f"{name} is {shown(value)}; expected {unit}a number")
    # written so that NaN is refused
    if not (value > 0 and least <= value <= most if below is None else 0 <= value < below):
        span = f"{least:g} to {most:g}" if least else f"more than 0, and {most:g} at most"
        if below is not None:
            span = "0 or more, and finite" if below == math.inf else f"0 to below {below:g}"
        raise error(f"{name} is {shown(value)}; expected {unit}{span}")


def host_array(values: Any) -> NDArray[Any]:
    """Return an array of any library as one of numpy, which may share its memory; what the library raises passes."""
    # The one place that knows tensors of torch, without importing it: off the device, and without the gradient.
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if str(values.dtype) == "torch.bfloat16" else values
    array = np.asarray(values)
    # numpy has no bfloat16, whose values float32 holds exactly; it takes long to name a type
    is_bfloat16 = array.dtype.kind not in "biu" and array.dtype.name == "bfloat16"
    return array.astype(np.float32) if is_bfloat16 else array


def as_array(values: Any, *, name: str, error: type[InputError] = TraceContentError) -> NDArray[Any]:
    """Return what numpy makes of an array of any library, unless it makes none or entries are masked."""
    try:
        array = host_array(values)
    except Exception as cause:  # whatever a foreign class raises
        raise error(
            f"{name}, a {type(values).__name__}, cannot be read as an array ({shown(cause)}); expected numbers in host "
            "memory, in rows of one length"
        ) from cause
    # numpy drops the mask, and what it hides would pass for values
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise error(f"{name} is an array with masked entries; expected a value everywhere")
    return array


def as_int32(
    values: ArrayLike, *, name: str, least: int = 0, error: type[InputError] = TraceContentError
) -> NDArray[np.int32]:
    """Return integers, such as token ids, as int32 [T], unless one is below `least` or does not fit."""
    array = as_array(values, name=name, error=error)
    if array.size == 0:
        return np.zeros(0, np.int32)
    fits = array.ndim == 1 and array.dtype.kind in "iu" and array.min() >= least
    if not fits or (not np.can_cast(array.dtype, np.int32) and array.max() > MOST_INT32):
        found = f", from {array.min()} to {array.max()}" if array.dtype.kind in "iu" else ""
        raise error(
            f"{name} is {array.dtype} of shape {array.shape}{found}; "
            f"expected integers [T] from {least} that fit 32 bits"
        )
    return array.astype(np.int32, copy=False)


def as_mask(mask: ArrayLike, *, name: str, error: type[InputError] = TraceContentError) -> NDArray[np.bool_]:
    """Return bools, or numbers 0 and 1 of any type, as bools of the same shape."""
    array = as_array(mask, name=name, error=error)
    kind = array.dtype.kind
    if kind not in "biuf" or (kind != "b" and ((array != 0) & (array != 1)).any()):
        raise error(f"{name} is {array.dtype} of shape {array.shape}; expected bools, or 0 and 1 alone")
    return array.astype(np.bool_, copy=False)


def as_numbers(
    values: ArrayLike,
    *,
    name: str,
    below: int | NDArray[np.int64],
    count: int | None = None,
    error: type[InputError] = TraceContentError,
) -> NDArray[np.int64]:
    """Return whole numbers, or one, as int64 [S'], each from 0 to `below` - 1; a mask or a fraction is refused.

    Args:
        values: integers [S'], or one.
        name: what they are, in the plural, for the message.
        below: one limit for all, or one for each.
        count: the S' that is expected, if one is.
        error: what to raise.
    """
    array = as_array(values, name=name, error=error)
    empty = array.shape == (0,) and array.dtype.kind != "b"
    if array.ndim > 1 or not (array.dtype.kind in "iu" or empty) or count not in (None, array.size):
        hint = "; turn a mask into numbers with numpy.flatnonzero" if array.dtype.kind == "b" else ""
        raise error(
            f"{name} are {array.dtype} of shape {array.shape}; expected {'' if count is None else f'{count} '}"
            f"whole numbers{hint}"
        )
    # below 0 would count from the end, as numpy does: a shifted number would pass for a sequence
    outside = np.flatnonzero((array < 0) | (array >= below))
    if outside.size:
        most = np.broadcast_to(below, array.shape).reshape(-1)[outside[0]] - 1
        raise error(f"{name} hold {array.reshape(-1)[outside[0]]}; expected whole numbers from 0 to {most}")
    return array.astype(np.int64).reshape(-1)

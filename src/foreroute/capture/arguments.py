"""Values that somebody handed in: shown in a message whatever they are, and taken for numbers only when they are."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from foreroute.errors import CaptureError, InputError

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 40


def shown(value: object) -> str:
    """A short text of any value. One that is nested deep, very long, or whose `repr` raises, is named by its type."""
    try:
        return _SHORT.repr(value)[:120]
    except Exception:
        return f"of type {type(value).__name__}"


def whole_number(value: object, name: str, low: int, high: int, *, kind: type[InputError] = CaptureError) -> int:
    """An integer of Python or numpy from `low` to `high`.

    Raises:
        kind: for other numbers, and for what is no integer: fractions, texts and booleans are not cast.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise kind(f"{name} is {shown(value)}; expected an integer from {low} to {high}")
    return int(value)


def field_of(record: Any, name: str) -> Any:
    """A field of a mapping, or of any other object its attribute or, failing that, its item; None when it has none.

    Raises:
        CaptureError: when the record does not let itself be asked.
    """
    try:
        if isinstance(record, Mapping):
            return record.get(name)
        value = getattr(record, name, None)
        return _item_of(record, name) if value is None and hasattr(type(record), "__getitem__") else value
    except Exception as error:
        raise CaptureError(f"{name} of a {type(record).__name__} cannot be read ({shown(error)})") from error


def items_of(values: Any, name: str) -> list[Any]:
    """The entries of a list or tuple.

    Raises:
        CaptureError: when it does not give them.
    """
    try:
        return [*values]
    except Exception as error:
        raise CaptureError(f"{name} cannot be read ({shown(error)}); expected a list") from error


def is_array(value: Any) -> bool:
    """Whether it is an array of some library. A tensor dictionary may have a shape and a dtype too, but has keys."""
    kind = type(value)
    return hasattr(kind, "__array__") and not hasattr(kind, "keys") and not isinstance(value, np.generic)


def as_array(values: Any, name: str) -> np.ndarray[Any, Any]:
    """What numpy makes of an array of any library.

    Raises:
        CaptureError: when it makes none, or entries are masked, which a plain array cannot say.
    """
    try:
        array = np.asarray(values)
    except Exception as error:
        raise CaptureError(
            f"{name}, a {type(values).__name__}, cannot be read as an array ({shown(error)}); "
            "copy it to host memory first"
        ) from error
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise CaptureError(f"{name} is an array with masked entries; expected a value everywhere")
    return array


def _item_of(record: Any, name: str) -> Any:
    try:
        return record[name]
    except (KeyError, IndexError, TypeError):
        return None

"""Bytes, text and lists to arrays. All of it may be hostile: sizes are checked before anything is allocated.

No function allocates more than a small multiple of its input: declared shapes must account for the bytes at hand.
Nothing is executed, and no pickle is read.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.recognition import MAX_TEXT, NPY_MAGIC, field_of, items_of, shown
from foreroute.errors import CaptureError

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int8", "uint16", "int16", "int32", "int64")}
# `numpy.save` writes exactly this; its own reader evaluates the header as a Python literal, which is not needed here.
_NPY_HEADER = re.compile(
    rb"\{'descr': '([<|][iu][1248])', 'fortran_order': (True|False), "
    rb"'shape': \((\d{1,12}), (\d{1,12}), (\d{1,12})\), \} *\n"
)
_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,12})x(\d{1,12})x(\d{1,12}):")


def read_base64(text: str) -> bytes:
    """Read standard base64 with padding; stray characters, line breaks and missing padding are refused."""
    if len(text) > MAX_TEXT:
        raise CaptureError(f"the base64 text has {len(text)} characters; expected at most {MAX_TEXT}")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (ValueError, UnicodeEncodeError) as error:
        raise CaptureError(f"the routes are not base64 ({error}, {len(text)} characters); was the text cut?") from error


def read_npy(data: bytes) -> NDArray[Any]:
    """Read an integer array [R, layers, K] from a version 1 `.npy` file."""
    header_end = 10 + int.from_bytes(data[8:10], "little")
    header = _NPY_HEADER.fullmatch(data[10:header_end])
    if data[:8] != NPY_MAGIC + b"\x01\x00" or len(data) < 10 or header is None:
        raise CaptureError(
            f"the .npy file starts with {bytes(data[:80])!r}; expected version 1 with an integer array of three axes"
        )
    shape = tuple(int(n) for n in header.groups()[2:])
    order = "F" if header[2] == b"True" else "C"
    return _shaped(data[header_end:], np.dtype(header[1].decode()), shape, what=".npy file", order=order)


def read_envelope(text: str) -> NDArray[Any]:
    """Read a signed array [S, L, K] from the NeMo RL envelope."""
    head = _ENVELOPE.match(text)
    if head is None:
        raise CaptureError(
            f"the envelope starts with {text[:60]!r}; expected nrlre1:<int8|int16|int32>:<S>x<L>x<K>:<base64>"
        )
    shape = tuple(int(n) for n in head.groups()[1:])
    return _shaped(read_base64(text[head.end() :]), _DTYPES[head[1]], shape, what="envelope")


def read_table(table: Mapping[str, Any]) -> NDArray[Any]:
    """Read an array [R, layers, K] from a table of data (base64 text or bytes), shape and dtype."""
    dtype, shape, data = (field_of(table, name) for name in ("dtype", "shape", "data"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CaptureError(f"the table has dtype {shown(dtype)}; expected one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list | tuple) or not _three_counts(items_of(shape, "the shape")):
        raise CaptureError(f"the table has shape {shown(shape)}; expected three counts [rows, layers, picks]")
    if not isinstance(data, str | bytes):
        raise CaptureError(f"the table has data of type {type(data).__name__}; expected base64 text or bytes")
    return _shaped(read_base64(data) if isinstance(data, str) else data, _DTYPES[dtype], tuple(shape), what="table")


def read_raw(text: str, dtype: str | None) -> NDArray[Any]:
    """Read a flat array from base64 of raw bytes; int32 unless the engine advertises another dtype."""
    name = "int32" if dtype is None else dtype
    if not isinstance(name, str) or name not in _DTYPES:
        raise CaptureError(f"the engine advertises dtype {shown(name)}; expected one of {', '.join(_DTYPES)}")
    data = read_base64(text)
    if len(data) % _DTYPES[name].itemsize:
        raise CaptureError(f"the routes have {len(data)} bytes, which is no whole number of {name}; was the text cut?")
    return np.frombuffer(data, _DTYPES[name])


def read_lists(nested: Any) -> NDArray[np.int64]:
    """Read an array [R, layers, K] from nested lists of integers. Floats, booleans and ragged rows are refused."""
    rows = nested if type(nested) is list else items_of(nested, "the nested lists")
    if not rows:
        return np.zeros((0, 0, 0), np.int64)
    _expect_lists([rows[0]], None)
    layers = len(rows[0])
    _expect_lists(rows, layers)
    cells = list(chain.from_iterable(rows))
    _expect_lists(cells, len(cells[0]) if cells and isinstance(cells[0], list | tuple) else None)
    picks = list(chain.from_iterable(cells))
    if not all(type(pick) is int for pick in picks):
        wrong = next(pick for pick in picks if type(pick) is not int)
        raise CaptureError(f"the lists hold {type(wrong).__name__} {shown(wrong)}; expected integers")
    try:
        flat = np.array(picks, dtype=np.int64)
    except OverflowError as error:
        raise CaptureError("the lists hold an integer beyond 64 bits; expected expert ids") from error
    return flat.reshape(len(rows), layers, -1) if picks else np.zeros((len(rows), layers, 0), np.int64)


def _three_counts(values: list[Any]) -> bool:
    return len(values) == 3 and all(type(n) is int and 0 <= n < 1 << 48 for n in values)


def _expect_lists(values: list[Any], length: int | None) -> None:
    for value in values:
        plain = type(value) in (list, tuple)
        if not plain or (length is not None and len(value) != length):
            seen = f"{len(value)} entries" if plain else f"{type(value).__name__}"
            wanted = "a list" if length is None else f"a list of {length}"
            raise CaptureError(f"the nested lists are uneven: found {seen} where {wanted} belongs")


def _shaped(data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], *, what: str, order: Any = "C") -> NDArray[Any]:
    if prod(shape) * dtype.itemsize != len(data) or (not data and shape[0]):
        raise CaptureError(
            f"the {what} states shape {shape} of {dtype}, which is {prod(shape) * dtype.itemsize} bytes; "
            f"{len(data)} bytes follow. Was it cut?"
        )
    if not data:
        return np.zeros((0, 0, 0), dtype)  # the axes of an empty array are unchecked numbers
    return np.frombuffer(data, dtype).reshape(shape, order=order)

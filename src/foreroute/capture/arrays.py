"""Values from outside, all of which may be hostile: fields of foreign objects, integer arrays, text and bytes.

A foreign object's attributes may raise, and its lists may be no lists, so that it is asked through the functions here
alone. Sizes are checked before anything is allocated, nothing is executed, and no pickle is read.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.checks import as_array, is_whole
from foreroute.errors import CaptureError, shown
from foreroute.files.regular import parse_json
from foreroute.trace import RoutedLayer

MAX_TEXT = 1 << 28
"""Characters of one text, JSON or base64: 256 Mi, some ten million tokens of a model of 48 layers in base64."""
NPY_MAGIC = b"\x93NUMPY"
TABLE = ("data", "shape", "dtype")
"""Fields of an array in JSON: its bytes in base64, as dynamo, prime-rl and ms-swift write them, or as they are."""
BYTES = (bytes, bytearray, memoryview)
TABLE_TYPES = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
# `numpy.save` writes exactly this; its own reader evaluates the header as a Python literal, which is not needed here.
_NPY_HEADER = re.compile(
    rb"\{'descr': '([<|][iu][1248])', 'fortran_order': (True|False), "
    rb"'shape': \((\d{1,12}), (\d{1,12}), (\d{1,12})\), \} *\n"
)


def field_of(record: Any, name: str) -> Any:
    """Return a field of a mapping, or of another object its attribute or else its item; None when it has none."""
    try:
        if isinstance(record, Mapping):
            return record.get(name)
        value = getattr(record, name, None)
        return _item_of(record, name) if value is None and hasattr(type(record), "__getitem__") else value
    except Exception as error:
        raise CaptureError(f"{name} of a {type(record).__name__} cannot be read ({shown(error)})") from error


def _item_of(record: Any, name: str) -> Any:
    """Return an item of an object; None when it has none."""
    try:
        return record[name]
    except (KeyError, IndexError, TypeError):
        return None


def items_of(values: Any, name: str) -> list[Any]:
    """Return the entries of a list or tuple, which may not give them."""
    try:
        return [*values]
    except Exception as error:
        raise CaptureError(f"{name} cannot be read ({shown(error)}); expected a list") from error


def is_array(value: Any) -> bool:
    """Say whether it is an array of some library."""
    array_class = type(value)
    # a tensor dictionary may have a shape and a dtype, but has keys
    return hasattr(array_class, "__array__") and not hasattr(array_class, "keys") and not isinstance(value, np.generic)


def is_table(value: Any) -> bool:
    """Say whether it is an array as a JSON object."""
    return isinstance(value, Mapping) and all(field_of(value, name) is not None for name in TABLE)


def is_nested(value: Any, depth: int = 3) -> bool:
    """Say whether it is lists of lists of lists of numbers, or `depth` deep, by the first of each."""
    if depth == 0:
        return type(value) is int
    return isinstance(value, list | tuple) and any(is_nested(each, depth - 1) for each in items_of(value, "a list")[:1])


def as_integers(values: Any, name: str) -> NDArray[Any]:
    """Return an array of integers of any library as one of numpy."""
    array = as_array(values, name=name, error=CaptureError)
    if array.dtype.kind not in "iu":
        raise CaptureError(f"{name}: dtype {array.dtype}; expected integers")
    return array


def read_npy(data: bytes) -> NDArray[Any]:
    """Read an integer array [rows, layers, K] from a version 1 `.npy` file, and nothing else."""
    header_end = 10 + int.from_bytes(data[8:10], "little")
    header = _NPY_HEADER.fullmatch(data[10:header_end])
    if data[:8] != NPY_MAGIC + b"\x01\x00" or len(data) < 10 or header is None:
        raise CaptureError(
            f"the .npy file starts with {bytes(data[:80])!r}; expected version 1 with an integer array of three axes"
        )
    dtype, shape, size = np.dtype(header[1].decode()), tuple(map(int, header.groups()[2:])), len(data) - header_end
    if prod(shape) * dtype.itemsize != size or (not size and shape[0]):
        raise CaptureError(
            f"the .npy file states shape {shape} of {dtype}, which is {prod(shape) * dtype.itemsize} bytes; "
            f"{size} bytes follow. Was it cut?"
        )
    if not size:
        return np.zeros((0, 0, 0), dtype)  # the axes of an empty array are unchecked numbers
    return np.frombuffer(data, dtype, offset=header_end).reshape(shape, order="F" if header[2] == b"True" else "C")


def read_rows(
    # an array or table, [R, L, K] or flat [R, L · K]; nested lists; the bytes of a `.npy` file; or base64 of int32
    # without a shape
    values: Any,
    rows: int,  # as many must lie in base64
    picks: int,  # K, of a row in a layer of base64
    name: str,  # says what they are
) -> NDArray[Any]:
    """Read what a sequence has in each layer, integers [R, layers, K], from what `values` are."""
    if isinstance(values, bytes):
        return read_npy(values)
    if not isinstance(values, str):
        array = _read_table(values, name) if is_table(values) else as_integers(_plain(values, name), name)
        if array.ndim == 2 and array.shape[1] % picks == 0:
            array = array.reshape(len(array), array.shape[1] // picks, picks)
        if array.ndim != 3:
            raise CaptureError(
                f"{name} have the shape {array.shape}; expected [rows, layers, picks], or [rows, layers * picks]"
            )
        return array
    data, rows = read_base64(values, name), max(rows, 0)
    layers, rest = divmod(len(data), max(4 * rows * picks, 1))
    if rest or bool(layers) != bool(rows):
        raise CaptureError(
            f"{name} are {len(data)} bytes without a shape; expected {rows} rows of {picks} int32 for each layer. Was "
            "the text cut? Else look at the tokens, start and top_k"
        )
    return np.frombuffer(data, "<i4").reshape(rows, layers, picks)


def _plain(values: Any, name: str) -> Any:
    """Return nested lists when they hold whole numbers alone, which numpy would make of truth values too."""
    if not isinstance(values, list | tuple):
        return values
    if not items_of(values, name):
        return np.zeros((0, 0, 0), np.int64)
    try:
        types = set(map(type, chain.from_iterable(chain.from_iterable(values))))
    except Exception as error:
        raise CaptureError(f"{name} cannot be read ({shown(error)}); expected lists [rows, layers, picks]") from error
    if types - {int}:
        names = sorted(each.__name__ for each in types - {int})
        raise CaptureError(f"{name} are lists that hold {', '.join(names)[:80]}; expected whole numbers")
    return values


def _read_table(table: Any, name: str) -> NDArray[Any]:
    """Read an array in a JSON object."""
    data, shape, dtype = (field_of(table, each) for each in TABLE)
    sizes = items_of(shape, f"the shape of {name}")
    data = as_bytes(data) if isinstance(data, BYTES) else data
    if not isinstance(data, str | bytes) or dtype not in TABLE_TYPES or not all(is_whole(n) and n >= 0 for n in sizes):
        raise CaptureError(
            f"{name} are a table of {shown(data)}, {shown(dtype)} of shape {shown(shape)}; expected base64, the axes, "
            f"and one of {', '.join(TABLE_TYPES)}"
        )
    size = np.dtype(dtype).itemsize * prod(sizes)
    # bytes are the array itself (verifiers), or base64 of it (renderers), which is longer
    content = data if isinstance(data, bytes) and len(data) == size else read_base64(data, name)
    if len(content) != size:
        raise CaptureError(f"{name} are {len(content)} bytes, and {dtype} {shown(shape)} is {size}; was the text cut?")
    return np.frombuffer(content, dtype).reshape(sizes) if content else np.zeros((0, 0, 0), dtype)


def columns_of(layers: Sequence[RoutedLayer], axis_length: int, name: str) -> NDArray[np.int64]:
    """Find the columns of the given layers on an axis of those layers, or of all decoder layers: int64 [L]."""
    numbers = [layer.index for layer in layers]
    if axis_length == len(numbers):
        return np.arange(len(numbers))
    # an axis of all layers has one column for two routers of a layer, such as those of JetMoe's attention and MLP
    if axis_length > max(numbers) and len(set(numbers)) == len(numbers):
        return np.array(numbers)
    raise CaptureError(
        f"{name} have {axis_length} layers; expected {len(numbers)} (those that decide), or all decoder layers, "
        f"{max(numbers) + 1} or more, with one column for each. Pipeline stages may not have been joined, or they are "
        "of another model"
    )


def as_bytes(view: bytes | bytearray | memoryview) -> bytes:
    """Return the bytes of a view, which may have been released."""
    try:
        return bytes(view)
    except ValueError as error:
        raise CaptureError(f"the {type(view).__name__} cannot be read ({error})") from error


def read_base64(text: str | bytes, name: str) -> bytes:
    """Read standard base64 with padding; stray characters, line breaks and missing padding are refused."""
    if len(text) > MAX_TEXT:
        raise CaptureError(f"{name} are base64 of {len(text)} characters; expected at most {MAX_TEXT}")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (ValueError, UnicodeEncodeError) as error:
        raise CaptureError(f"{name} are not base64 ({error}, {len(text)} characters); was the text cut?") from error


def parse_text(text: str | bytes, *, name: str = "the text, which may have been cut,") -> Any:
    """Return the value of a JSON text, bounded in length and depth. `name` says which, for the message."""
    if len(text) > MAX_TEXT:
        raise CaptureError(f"{name} has {len(text)} characters; expected at most {MAX_TEXT}")
    return parse_json(text, CaptureError, name=name)

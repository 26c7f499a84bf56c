"""Compiled loops: C++ beside the Python that calls it, in one library. Other threads run while one runs.

A loop takes arrays as `Array<T, N>` of kernels.hpp and named tuples as structs with the same fields in the same order.
What does not fit is refused before the loop begins. Inside of it indices are checked in the fuzzer's library alone.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import DTypeLike

NONE = -1
"""No rank, no expert, no slot."""

FILE = Path(os.environ.get("FOREROUTE_KERNELS") or Path(__file__).with_name("_kernels.so"))
"""The library. The variable names another build of it, which only tests do."""
if not FILE.is_file():
    raise ImportError(f"{FILE} is missing, which installing foreroute compiles; in a checkout: make kernels")
_LIBRARY = ctypes.CDLL(str(FILE))

INT, FLOAT, BOOL = ctypes.c_int64, ctypes.c_double, ctypes.c_bool
"""Numbers that loops take and return: `int64_t`, `double`, `bool`."""
_LETTERS = {INT: "q", FLOAT: "d", BOOL: "?"}
_HEADER = object.__basicsize__
"""Behind the header that all objects have, NumPy's binary interface has where an array's elements begin. Other ways to
ask for that take 10 to 20 times as long, which is as long as pricing a cell."""


class ArrayOf:
    """Arrays of one dtype and number of axes, contiguous in C's order: `Array<T, N>`, T const unless it is `filled`."""

    def __init__(self, dtype: DTypeLike, ndim: int, *, filled: bool = False) -> None:
        self.dtype, self.ndim, self.filled = np.dtype(dtype), ndim, filled
        self.letters = "q" * (1 + ndim)
        self._pack = struct.Struct(self.letters).pack

    def words(self, array: Any) -> tuple[int, ...]:
        """Return the address and shape of an array. Raises TypeError unless it fits."""
        flags = array.flags
        if array.dtype != self.dtype or array.ndim != self.ndim or not flags.c_contiguous:
            seen = f"{array.dtype} {array.shape}"
            raise TypeError(f"a contiguous {self.dtype} array of {self.ndim} axes was expected, not {seen}")
        if self.filled and not flags.writeable:
            raise TypeError(f"an array that can be written was expected: {array.dtype} {array.shape}")
        return (INT.from_address(id(array) + _HEADER).value, *array.shape)

    def from_param(self, array: Any) -> bytes:
        """Return the bytes whose address ctypes hands over."""
        return self._pack(*self.words(array))


class StructOf:
    """Records whose attributes are arrays, numbers or structs: a C++ struct with the same fields in the same order."""

    def __init__(self, **fields: Any) -> None:
        self._fields = [(name, getattr(one, "words", None)) for name, one in fields.items()]
        # a struct in a struct begins and ends where its widest field may, as C++ has it
        letters = [_LETTERS.get(one) or one.letters for one in fields.values()]
        self.letters = "0q" + "".join(letters) + "0q"
        self._pack = struct.Struct(self.letters).pack

    def words(self, record: Any) -> Iterable[Any]:
        """Return the fields' values, arrays by address and shape. Raises TypeError unless all fit."""
        found: list[Any] = []
        for name, words in self._fields:
            value = getattr(record, name)
            if words is None:
                found.append(value)
            else:
                found += words(value)
        return found

    def from_param(self, record: Any) -> bytes:
        """Return the bytes whose address ctypes hands over."""
        return self._pack(*self.words(record))


def compiled(name: str, *takes: Any, returns: Any = None) -> Callable[..., Any]:
    """The loop of this name, which takes these and returns a number or nothing."""
    loop = _LIBRARY[name]
    loop.argtypes, loop.restype = takes, returns
    return loop


def _refuse_stale(folder: Path) -> None:
    """Raise `ImportError` in a checkout whose library was compiled from other sources: structs may differ in it."""
    # wheels have no sources, and a library that is named is another on purpose
    if os.environ.get("FOREROUTE_KERNELS") or not (folder / "kernels.hpp").is_file():
        return
    found = crc32(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.[ch]pp"))))
    if not hasattr(_LIBRARY, "sources_checksum") or compiled("sources_checksum", returns=INT)() != found:
        raise ImportError(f"{FILE} was compiled from other sources than are here; compile it anew: make kernels")


_refuse_stale(Path(__file__).parent)

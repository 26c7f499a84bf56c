"""A safetensors file read by position, so that a reader of a part reads that part alone.

The safetensors library maps files into memory, where one that another process cuts ends this process with SIGBUS. Its
format is small: 8 bytes of length, a JSON header, and tensors that tile the rest.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError
from foreroute.files.reading import RegularFile, parse_json

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"{letter.upper()}{bits}": np.dtype(f"<{letter}{bits // 8}") for letter in "iu" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
"""The types that numpy has. A tensor of another one is refused."""
MOST_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
MOST_AXES, MOST_TENSOR_BYTES = 32, 1 << 62
"""What numpy can hold, also of a tensor with an axis of 0."""


@dataclass(frozen=True)
class _Tensor:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """An opened safetensors file. Its header is checked whole, its tensors are read when they are asked for.

    Args:
        path: the file.
        kind: the error to raise.
        most_header_bytes: a longer header is refused. A parsed one takes about 25 times its bytes of memory at most.

    Attributes:
        path: the file.
        metadata: its strings by name.

    Raises:
        kind: when it cannot be opened, or is not a whole safetensors file.
    """

    def __init__(
        self, path: str | os.PathLike[str], kind: type[InputError], *, most_header_bytes: int = MOST_HEADER_BYTES
    ) -> None:
        self._file, self._kind = RegularFile(path, kind), kind
        self.path = self._file.path
        try:
            self.metadata, self._tensors = self._read_header(most_header_bytes)
        except BaseException:
            self._file.close()
            raise

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._tensors)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of a tensor, little-endian."""
        return self._tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._tensors[name].shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """A tensor, or of its first axis the part from `start` to `stop`.

        Raises:
            kind: when the file was cut meanwhile, or the part is not in the tensor.
        """
        tensor = self._tensors[name]
        if not tensor.shape:
            raise self._kind(f"{self.path}: tensor {name} has no axes")
        rows = tensor.shape[0]
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise self._kind(f"{self.path}: rows {start} to {stop} of tensor {name} are not among its {rows}")
        row_bytes = prod(tensor.shape[1:]) * tensor.dtype.itemsize
        values: NDArray[Any] = np.empty((stop - start, *tensor.shape[1:]), tensor.dtype)
        if values.nbytes:
            self._file.fill(values.reshape(-1).view(np.uint8).data, tensor.start + start * row_bytes)
        return values

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self, most_bytes: int) -> tuple[dict[str, str], dict[str, _Tensor]]:
        size = self._file.size
        length = int.from_bytes(self._file.read(0, 8), "little") if size >= 8 else size
        if length > size - 8:
            raise self._wrong(f"its header would take {length} of its {size} bytes")
        if length > most_bytes:
            raise self._kind(f"{self.path} has a header of {length} bytes; expected {most_bytes} at most")
        header = parse_json(self._file.read(8, length), self._kind, name=f"{self.path}: the safetensors header")
        if not isinstance(header, dict):
            raise self._wrong(f"its header is {type(header).__name__}, not an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._wrong("its metadata are not strings")
        begin, tensors = 8 + length, {}
        end = begin
        for name, (first, after, tensor) in sorted(
            ((name, self._entry(name, entry)) for name, entry in header.items()), key=lambda item: item[1][:2]
        ):
            if begin + first != end:
                raise self._wrong(f"tensor {name} begins at byte {first}, expected {end - begin}")
            tensors[name] = _Tensor(tensor.dtype, tensor.shape, end)
            end = begin + after
        if end != size:
            raise self._wrong(f"its header describes {end} bytes, it has {size}")
        return metadata, tensors

    def _entry(self, name: str, entry: Any) -> tuple[int, int, _Tensor]:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._wrong(f"the entry of tensor {name} is {entry!r:.80}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._wrong(f"tensor {name} is of type {dtype!r:.40}; expected one of {', '.join(DTYPES)}")
        possible = _counts(shape) and _counts(offsets) and len(offsets) == 2 and len(shape) <= MOST_AXES
        if not possible or prod(max(1, axis) for axis in shape) * DTYPES[dtype].itemsize > MOST_TENSOR_BYTES:
            raise self._wrong(f"tensor {name} has shape {shape!r:.60} and offsets {offsets!r:.60}")
        if offsets[0] + prod(shape) * DTYPES[dtype].itemsize != offsets[1]:
            raise self._wrong(f"tensor {name} of {dtype} {shape} does not take the bytes {offsets}")
        return offsets[0], offsets[1], _Tensor(DTYPES[dtype], tuple(shape), 0)

    def _wrong(self, why: str) -> InputError:
        return self._kind(f"{self.path} is not a whole safetensors file: {why}. It may be truncated; copy it again")


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MOST_TENSOR_BYTES for value in values)

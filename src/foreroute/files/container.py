"""The container of every binary file here: a safetensors file, whose header is checked whole before anything is read.

The format is 8 bytes of length, a JSON header, and tensors that tile the rest
(https://github.com/huggingface/safetensors#format). The safetensors library reads what is written here, but is not used
to read: it maps files into memory. Nor to write: it orders metadata at random, and files of equal content are to be
equal bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from math import prod
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError
from foreroute.files.regular import ByteSource, RegularFile, is_text, parse_json

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"{letter.upper()}{bits}": np.dtype(f"<{letter}{bits // 8}") for letter in "iu" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
"""The types that numpy has, by their name in a header. A tensor of another one is refused."""
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
MOST_AXES, MOST_TENSOR_BYTES = 32, 1 << 62
"""What numpy can hold, also of a tensor with an axis of 0."""


@dataclass(frozen=True)
class StoredTensor:
    """What the header says of one tensor.

    Attributes:
        dtype: of its numbers, little-endian.
        shape: of the tensor.
        start: the byte of the file at which it begins.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """An opened safetensors file. Its header is checked whole, its tensors are read when they are asked for.

    Args:
        source: the path of a regular file, or a source of bytes, which this does not close.
        kind: the error to raise. A source raises its own where it cannot read.
        most_header_bytes: a longer header is refused. A parsed one takes about 25 times its bytes of memory at most.

    Attributes:
        name: of the source, for messages.
        metadata: its strings by name, all of them text.
        tensors: what the header says of each tensor, by name, in the order of their bytes.

    Raises:
        kind: when it cannot be opened, or is not a whole safetensors file.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | ByteSource,
        kind: type[InputError],
        *,
        most_header_bytes: int = MOST_HEADER_BYTES,
    ) -> None:
        self._opened = RegularFile(source, kind) if isinstance(source, str | os.PathLike) else None
        self._source: ByteSource = source if self._opened is None else self._opened  # type: ignore[assignment]
        self.name, self._kind = self._source.name, kind
        try:
            self.metadata, self.tensors = self._read_header(most_header_bytes)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """A tensor, or of its first axis the part from `start` to `stop`. The array is the caller's own.

        Raises:
            kind: when the file was cut meanwhile, or the part is not in the tensor.
        """
        tensor = self.tensors[name]
        rows, *rest = tensor.shape or (1,)
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise self._kind(f"{self.name}: rows {start} to {stop} of tensor {name} are not among its {rows}")
        row_bytes = prod(rest) * tensor.dtype.itemsize
        content = self._bytes(tensor.start + start * row_bytes, (stop - start) * row_bytes)
        values = np.frombuffer(content if isinstance(content, bytearray) else bytearray(content), tensor.dtype)
        # numpy takes such bytes for true, and yet for unequal
        if tensor.dtype == np.bool_ and (values.view(np.uint8) > 1).any():
            raise self._wrong(f"tensor {name} holds truth values that are neither 0 nor 1")
        return values.reshape((stop - start, *rest) if tensor.shape else ())

    def close(self) -> None:
        """Let go of the file that this opened."""
        if self._opened is not None:
            self._opened.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bytes(self, start: int, size: int) -> bytes | bytearray:
        content = self._source.read(start, size) if size else b""
        if len(content) != size:
            raise self._kind(f"{self.name} gave {len(content)} bytes; expected {size} from byte {start} on")
        return content

    def _read_header(self, most_bytes: int) -> tuple[dict[str, str], dict[str, StoredTensor]]:
        size = self._source.size
        length = int.from_bytes(self._bytes(0, 8), "little") if size >= 8 else size
        if length > size - 8:
            raise self._wrong(f"its header would take {length} of its {size} bytes")
        if length > most_bytes:
            raise self._kind(f"{self.name} has a header of {length} bytes; expected {most_bytes} at most")
        header = parse_json(self._bytes(8, length), self._kind, name=f"{self.name}: the safetensors header")
        if not isinstance(header, dict) or not all(map(is_text, header)):
            raise self._wrong(f"its header is {type(header).__name__}; expected an object whose keys are text")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(map(is_text, (*metadata, *metadata.values()))):
            raise self._wrong("its metadata are not strings")
        tensors, end = {}, 8 + length
        # in the order of their bytes, each must begin where the one before ends: no gap, no overlap, nothing behind
        entries = [(*self._entry(name, entry), name) for name, entry in header.items()]
        for first, after, dtype, shape, name in sorted(entries, key=lambda each: (each[0], each[1])):
            if 8 + length + first != end:
                raise self._wrong(f"tensor {name} begins at byte {first}, expected {end - 8 - length}")
            tensors[name] = StoredTensor(dtype, shape, end)
            end = 8 + length + after
        if end != size:
            raise self._wrong(f"its header describes {end} bytes, it has {size}")
        return metadata, tensors

    def _entry(self, name: str, entry: Any) -> tuple[int, int, np.dtype[Any], tuple[int, ...]]:
        """Where a tensor begins and ends behind the header, its type and its shape."""
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._wrong(f"the entry of tensor {name} is {entry!r:.80}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._wrong(f"tensor {name} is of type {dtype!r:.40}; expected one of {', '.join(DTYPES)}")
        # types are checked before sizes are multiplied: a shape may hold anything that JSON can
        possible = _counts(shape) and _counts(offsets) and len(offsets) == 2 and len(shape) <= MOST_AXES
        if not possible or prod(max(1, axis) for axis in shape) * DTYPES[dtype].itemsize > MOST_TENSOR_BYTES:
            raise self._wrong(f"tensor {name} has shape {shape!r:.60} and offsets {offsets!r:.60}")
        if offsets[0] + prod(shape) * DTYPES[dtype].itemsize != offsets[1]:
            raise self._wrong(f"tensor {name} of {dtype} {shape} does not take the bytes {offsets}")
        return offsets[0], offsets[1], DTYPES[dtype], tuple(shape)

    def _wrong(self, why: str) -> InputError:
        return self._kind(f"{self.name} is not a whole safetensors file: {why}. It may be truncated; copy it again")


def write_tensors(file: IO[bytes], metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write a safetensors file, tensor by tensor, so that no second copy of all is made.

    Equal content gives equal bytes, in whatever order it is handed in: the header is sorted, and tensors stand by the
    size of their numbers, the largest first, so that each begins aligned, and then by name.

    Raises:
        InputError: when a tensor is of a type that `DTYPES` lacks.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": _type(name, tensors[name]), "shape": tensors[name].shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(_little_endian(tensors[name]).data)


def tensors_to_bytes(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """What `write_tensors` writes."""
    file = BytesIO()
    write_tensors(file, metadata, tensors)
    return file.getvalue()


def checksum(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> str:
    """`blake2b_hex` of metadata and tensors, each in order of name.

    A field is its length in bytes as decimal digits, ":", and its bytes. Hashed are the fields: the number of metadata;
    key and value of each; name, type as in the header, shape joined by "x", and data of each tensor.

    It finds damage and mix-ups and is no signature: whoever can write a file can make its checksum too.
    """
    fields = [str(len(metadata)).encode()]
    for key in sorted(metadata):
        fields += [key.encode(), metadata[key].encode()]
    parts: list[Any] = [b"%d:%b" % (len(field), field) for field in fields]
    for name in sorted(tensors):
        tensor = tensors[name]
        described = (name, _type(name, tensor), "x".join(map(str, tensor.shape)))
        parts += [b"%d:%b" % (len(field), field) for field in map(str.encode, described)]
        parts += [b"%d:" % tensor.nbytes, _little_endian(tensor)]
    return blake2b_hex(*parts)


def blake2b_hex(*parts: bytes | bytearray | memoryview | NDArray[Any]) -> str:
    """BLAKE2b of 16 bytes, as 32 hexadecimal digits, of the bytes of all parts one after another.

    Arrays are hashed in C order; their type and shape must be known or hashed too.
    """
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part)
    return state.hexdigest()


def blake2b_int64(*parts: bytes | bytearray | memoryview | NDArray[Any]) -> int:
    """The first 64 bits of `blake2b_hex` as a signed integer, for where checksums are compared in a tensor."""
    return int.from_bytes(bytes.fromhex(blake2b_hex(*parts)[:16]), "big", signed=True)


def _type(name: str, tensor: NDArray[Any]) -> str:
    dtype = tensor.dtype.newbyteorder("<")
    if dtype not in NAME_OF:
        raise InputError(f"tensor {name} is {tensor.dtype}; expected one of {', '.join(map(str, NAME_OF))}")
    return NAME_OF[dtype]


def _little_endian(tensor: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<"))


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MOST_TENSOR_BYTES for value in values)

"""The container of every binary file here: a safetensors file, whose header is checked whole before anything is read.

The format is 8 bytes of length, a JSON header, and tensors that tile the rest
(https://github.com/huggingface/safetensors#format). The safetensors library reads what is written here, but is not used
to read: it maps files into memory. Nor to write: it orders metadata at random, and files of equal content are to be
equal bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError, few, shown
from foreroute.files.locations import open_at, write_at
from foreroute.files.regular import HEAD_BYTES, as_path, it_is, open_regular, parse_json, reason
from foreroute.files.writing import write_atomically, writing_named

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
"""Limits of numpy, also of a tensor with an axis of 0."""
KEY = "foreroute."
"""Metadata whose key begins so are a format's own: none may be missing, and none may be there that it does not name.
Others are anybody's, and no part of the checksum."""


def as_location(location: str | os.PathLike[str], error: type[InputError]) -> Path | str:
    """Return a path, or the URL that this is: text with "://" that does not begin with `file://`."""
    if isinstance(location, str) and "://" in location and not location.startswith("file://"):
        return location
    return as_path(location.removeprefix("file://") if isinstance(location, str) else location, error)


@dataclass(frozen=True)
class TensorSchema:
    """Type and shape that one tensor must have."""

    dtypes: str  # the types it may have, by their names in a header: "I16", or "U8 U16"
    axes: str  # a letter for each axis; axes with one letter have one length in all tensors of a file
    # whether its numbers are sizes of what lies one after another: 0 or more, and below 2^63 together
    sizes: bool = False


@dataclass(frozen=True)
class FileFormat:
    """One format in the container, with the metadata `foreroute.<name>`, its version, `metadata`, and a checksum."""

    name: str  # of the format, in keys and messages
    version: int  # the only one that is read
    error: type[InputError]  # the error to raise
    metadata: tuple[str, ...]  # keys, without `foreroute.`
    tensors: Mapping[str, TensorSchema] | None  # schemas by name; None for any
    made_by: str  # what writes such files, in words, for whoever hands in another file
    # tensors that are read in part: they have checksums of their own, and no place in that of the file
    apart: tuple[str, ...] = ()
    most_header_bytes: int = 1 << 20  # a longer safetensors header is refused before it is parsed
    # tensors of which a file has all or none beside `tensors`
    together: Mapping[str, TensorSchema] = field(default_factory=dict)

    def read(
        self, source: str | os.PathLike[str] | BinaryIO, *, name: str = "the opened file"
    ) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
        """Return metadata by their keys in `metadata`, and tensors, once both are known to be what was written."""
        with self.open(source, name=name) as file:
            return self.read_opened(file)

    def open(self, source: str | os.PathLike[str] | BinaryIO, *, name: str = "the opened file") -> TensorFile:
        """Open a file whose header is to be looked at, or which is read in part."""
        return TensorFile(source, self.error, name=name, made_by=self.made_by, most_header_bytes=self.most_header_bytes)

    def read_opened(self, file: TensorFile) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
        """Read an opened file as `read` does, without the tensors that stand apart."""
        # by the header alone: what is no such file is refused before any tensor is read
        version = file.metadata.get(KEY + self.name)
        if version is None:
            # the version of another format is the number by its name
            has = few(key for key, value in file.metadata.items() if key.startswith(KEY) and value.isdecimal())
            raise self.error(
                f"{file.name} is no {self.name} file: its metadata lack {KEY + self.name}. {self.made_by}"
                f"{has and f'; this one has {has}'}"
            )
        if version != str(self.version):
            raise self.error(
                f"{file.name} is a {self.name} file of version {version:.40}; this foreroute reads version "
                f"{self.version}. Make it again"
            )
        fields = {key: value for key, value in file.metadata.items() if key.startswith(KEY)}
        expected = {KEY + key for key in (self.name, *self.metadata, "checksum")}
        if set(fields) != expected:
            raise self.error(
                f"{file.name} is no readable {self.name} file: its metadata are {few(fields)}; expected {few(expected)}"
            )
        if (why := self._objection(file.tensors)) is not None:
            raise self.error(f"{file.name} is no readable {self.name} file: {why}")
        tensors = {name: file.read(name) for name in file.tensors if name not in self.apart}
        stated, found = fields.pop(KEY + "checksum"), checksum(fields, tensors)
        if found != stated:
            raise self.error(
                f"{file.name} is damaged: its checksum is {found}, the file states {stated:.40}; copy it again, or "
                "make it again"
            )
        for name in [name for name, schema in (self.tensors or {}).items() if schema.sizes]:
            # a sum of sizes from 0 that wraps becomes negative at once
            if (tensors[name] < 0).any() or (np.cumsum(tensors[name]) < 0).any():
                raise self.error(f"{file.name} is damaged: its {name} are not sizes that add up to less than 2^63")
        return {key: fields[KEY + key] for key in self.metadata}, tensors

    def is_in(self, path: str | os.PathLike[str]) -> bool:
        """Say whether a file states that it is of this format, of any version."""
        try:
            with self.open(path) as file:
                return KEY + self.name in file.metadata
        except self.error:
            return False

    def to_bytes(self, metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> bytes:
        """Return the content of a file; equal content is equal bytes."""
        return tensors_to_bytes(self._complete(metadata, tensors), tensors)

    def write(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, str],
        tensors: Mapping[str, NDArray[Any]],
        *,
        overwrite: bool,
    ) -> Path | str:
        """Write a file to a path or a URL, the whole file or nothing, and return which."""
        target, complete = as_location(path, self.error), self._complete(metadata, tensors)
        if isinstance(target, str):
            write_at(target, lambda file: _write_tensors(file, complete, tensors), self.error, overwrite=overwrite)
            return target
        with writing_named(target, self.error):
            if target.exists() and not overwrite:
                raise self.error(f"{target} already exists; pass another path, or overwrite=True to replace it")
            write_atomically(target, lambda file: _write_tensors(file, complete, tensors), overwrite=overwrite)
        return target

    def _objection(self, tensors: Mapping[str, StoredTensor] | Mapping[str, NDArray[Any]]) -> str | None:
        """Say what is wrong with the tensors; None for nothing."""
        if self.tensors is None:
            return None
        return objection(tensors, {**self.tensors, **(self.together if set(self.together) & set(tensors) else {})})

    def _complete(self, metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> dict[str, str]:
        """Return the metadata as they stand in the file, with version and checksum."""
        if (why := self._objection(tensors)) is not None:
            raise self.error(f"this {self.name} file cannot be written: {why}")
        fields = {KEY + self.name: str(self.version), **{KEY + key: metadata[key] for key in self.metadata}}
        covered = {name: tensor for name, tensor in tensors.items() if name not in self.apart}
        return {**fields, KEY + "checksum": checksum(fields, covered)}


def objection(
    tensors: Mapping[str, StoredTensor] | Mapping[str, NDArray[Any]], schemas: Mapping[str, TensorSchema]
) -> str | None:
    """Say what is wrong with the names, types and axes of tensors, looked at before any is read; None for nothing."""
    if set(tensors) != set(schemas):
        return f"its tensors are {few(tensors)}; expected {few(schemas)}"
    length_of: dict[str, tuple[int, str]] = {}
    for name, schema in schemas.items():
        tensor, dtypes = tensors[name], schema.dtypes.split()
        if tensor.dtype not in [DTYPES[dtype] for dtype in dtypes]:
            return f"tensor {name} is {tensor.dtype}; expected {' or '.join(dtypes)}"
        if len(tensor.shape) != len(schema.axes):
            return f"tensor {name} has the shape {list(tensor.shape)}; expected [{', '.join(schema.axes)}]"
        for axis, length in zip(schema.axes, tensor.shape, strict=True):
            first, where = length_of.setdefault(axis, (length, name))
            if length != first:
                return f"tensor {name} has {length} along {axis}, and {where} has {first}; expected the same"
    return None


@dataclass(frozen=True)
class StoredTensor:
    """Header entry of one tensor: its little-endian type, its shape, and the first byte of it in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """An opened safetensors file. Its header is checked whole, its tensors are read when they are asked for.

    `source` is a path or a URL, which are closed with this; or an opened file, which may be in memory. A parsed header
    takes about 25 times its bytes of memory at most.

    Attributes:
        name: of the file, for messages.
        metadata: its texts by name.
        tensors: what the header says of each tensor, in the order of their bytes.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        error: type[InputError],
        *,
        name: str = "the opened file",
        made_by: str = "",
        most_header_bytes: int = MOST_HEADER_BYTES,
    ) -> None:
        given: Any = source
        self._was_opened_here = not hasattr(given, "seek")  # what is no opened file must be a path, or is refused
        self._error, self.name = error, str(source) if self._was_opened_here else name
        self._file: Any = given
        if self._was_opened_here:
            location = as_location(given, error)
            self._file = open_at(location, error) if isinstance(location, str) else open_regular(location, error)
        try:
            with self._reading():
                self._size = self._file.seek(0, os.SEEK_END)
            head = self._bytes(0, min(self._size, 9)).tobytes()
            if head[4:] != b"\0\0\0\0{":
                head = self._bytes(0, min(self._size, HEAD_BYTES)).tobytes()
                raise error(f"{self.name} is not a safetensors file{it_is(head)}{made_by and f'. {made_by}'}")
            if (length := int.from_bytes(head[:8], "little")) > self._size - 8:
                raise self._wrong(f"its header would take {length} of its {self._size} bytes")
            if length > most_header_bytes:
                raise error(f"{self.name} has a header of {length} bytes; expected {most_header_bytes} at most")
            text = (head[8:] + self._bytes(9, max(length - 1, 0)).tobytes())[:length]  # no byte is fetched twice
            header = parse_json(text, error, name=f"{self.name}: the safetensors header")
            self.metadata, self.tensors = self._described(header, 8 + length)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return a tensor, or the part from `start` to `stop` of its first axis, as an array of the caller's own."""
        tensor = self.tensors[name]
        rows, *rest = tensor.shape or (1,)
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise self._error(f"{self.name}: rows {start} to {stop} of tensor {name} are not among its {rows}")
        row_bytes = prod(rest) * tensor.dtype.itemsize
        content = self._bytes(tensor.start + start * row_bytes, (stop - start) * row_bytes)
        # numpy takes such bytes for true, and yet for unequal
        if tensor.dtype == np.bool_ and (content > 1).any():
            raise self._wrong(f"tensor {name} holds truth values that are neither 0 nor 1")
        return content.view(tensor.dtype).reshape((stop - start, *rest) if tensor.shape else ())

    def close(self) -> None:
        """Close the file if this opened it."""
        if self._was_opened_here:
            self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn whatever the library that has the file raises into the error that the caller names."""
        try:
            yield
        except Exception as cause:
            raise self._error(f"{self.name} cannot be read ({reason(cause)})") from cause

    def _bytes(self, start: int, size: int) -> NDArray[np.uint8]:
        """Return exactly `size` bytes from `start`, which the file had when it was opened."""
        content = np.empty(size, np.uint8)
        with self._reading():
            self._file.seek(start)
            found = self._file.readinto(content.data)
        # never mapped, so that a file that is cut meanwhile is told here
        if found < size:
            raise self._error(f"{self.name} was cut while it was read; copy it again")
        return content

    def _described(self, header: Any, begin: int) -> tuple[dict[str, str], dict[str, StoredTensor]]:
        """Return metadata and tensors of a parsed header; the tensors' bytes begin at `begin`."""
        metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._wrong("its header is no object, or its metadata are not strings")
        try:  # JSON can name halves of characters, which no text has
            "".join([*header, *metadata, *metadata.values()]).encode()
        except UnicodeEncodeError as cause:
            raise self._wrong(f"a name or a text of its header is no text ({cause.reason})") from cause
        tensors, end = {}, begin
        # in the order of their bytes, each must begin where the one before ends: no gap, no overlap, nothing behind
        entries = [(*self._entry(name, entry), name) for name, entry in header.items()]
        for first, after, dtype, shape, name in sorted(entries, key=lambda each: (each[0], each[1])):
            if begin + first != end:
                raise self._wrong(f"tensor {name} begins at byte {first}, expected {end - begin}")
            tensors[name] = StoredTensor(dtype, shape, end)
            end = begin + after
        if end != self._size:
            raise self._wrong(f"its header describes {end} bytes, it has {self._size}")
        return metadata, tensors

    def _entry(self, name: str, entry: Any) -> tuple[int, int, np.dtype[Any], tuple[int, ...]]:
        """Return where a tensor begins and ends behind the header, its type and its shape."""
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._wrong(f"the entry of tensor {name} is {shown(entry)}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._wrong(f"tensor {name} is of type {shown(dtype)}; expected one of {', '.join(DTYPES)}")
        # types are checked before sizes are multiplied: a shape may hold anything that JSON can
        possible = _counts(shape) and _counts(offsets) and len(offsets) == 2 and len(shape) <= MOST_AXES
        if not possible or prod(max(1, axis) for axis in shape) * DTYPES[dtype].itemsize > MOST_TENSOR_BYTES:
            raise self._wrong(f"tensor {name} has shape {shown(shape)} and offsets {shown(offsets)}")
        if offsets[0] + prod(shape) * DTYPES[dtype].itemsize != offsets[1]:
            raise self._wrong(f"tensor {name} of {dtype} {shape} does not take the bytes {offsets}")
        return offsets[0], offsets[1], DTYPES[dtype], tuple(shape)

    def _wrong(self, why: str) -> InputError:
        """Make the error for a file that is damaged."""
        return self._error(f"{self.name} is not a whole safetensors file: {why}. It may be truncated; copy it again")


def tensors_to_bytes(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """Return a safetensors file; equal content gives equal bytes, in whatever order it is handed in."""
    file = BytesIO()
    _write_tensors(file, metadata, tensors)
    return file.getvalue()


def _write_tensors(file: IO[bytes], metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write a safetensors file, tensor by tensor, so that no second copy of all is made."""
    # the largest numbers first, so that each tensor begins aligned
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": _type(name, tensors[name]), "shape": tensors[name].shape, "data_offsets": [begin, end]}
    # sorted, as the metadata are: equal content must be equal bytes
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(_little_endian(tensors[name]).data)


def checksum(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> str:
    """Return `blake2b_hex` of metadata and tensors, in order of name: it finds damage, and proves no author.

    Hashed are fields, each as its length in decimal digits, ":", and its bytes: the number of metadata; key and value
    of each; name, type as in the header, shape joined by "x", and data of each tensor.
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
    """Return BLAKE2b of 16 bytes, in hexadecimal, of the bytes of all parts; arrays in C order, without their type."""
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part)
    return state.hexdigest()


def _type(name: str, tensor: NDArray[Any]) -> str:
    """Return the name of a tensor's type in a header."""
    dtype = tensor.dtype.newbyteorder("<")
    if dtype not in NAME_OF:
        raise InputError(f"tensor {name} is {tensor.dtype}; expected one of {', '.join(map(str, NAME_OF))}")
    return NAME_OF[dtype]


def _little_endian(tensor: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor as its bytes stand in a file."""
    return np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<"))


def _counts(values: Any) -> bool:
    """Say whether this is a list of sizes."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MOST_TENSOR_BYTES for value in values)

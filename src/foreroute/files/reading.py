"""Opening and reading what others wrote. Every failure is one error of the caller's kind that names the path.

A file is never mapped into memory: a mapped file that another process cuts ends this one with SIGBUS. So safetensors
files are read here too, by position, and not with their library, which maps them: the format is 8 bytes of length, a
JSON header, and tensors that tile the rest (https://github.com/huggingface/safetensors#format). A FIFO, a device or a
socket is never opened for reading: it would wait, or go on, for ever.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import ForerouteError, InputError

MOST_BYTES = 4 << 30
"""What is read in one piece at most, unless the caller says otherwise; larger inputs are mistakes."""
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


class RegularFile:
    """An opened file that is known to be one, read by position.

    Args:
        path: the file.
        kind: the error to raise.

    Attributes:
        path: the file.
        size: bytes when it was opened.
        status: whose it is and who may write it.

    Raises:
        kind: when it is missing, cannot be opened, or is a folder, FIFO, device or socket.
    """

    def __init__(self, path: str | os.PathLike[str], kind: type[InputError]) -> None:
        self.path, self._kind = Path(path), kind
        try:
            # O_NONBLOCK: to open a FIFO would otherwise wait for a writer
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise kind(f"{self.path} does not exist") from error
        except (OSError, ValueError) as error:
            raise kind(f"{self.path} cannot be opened ({_reason(error)})") from error
        self.status = os.fstat(self._descriptor)
        if not stat.S_ISREG(self.status.st_mode):
            self.close()
            raise kind(f"{self.path} is {_what(self.status.st_mode)}; expected a file")
        self.size = self.status.st_size

    def read(self, start: int, size: int) -> bytearray:
        """Exactly `size` bytes from `start`.

        Raises:
            kind: when they cannot be read, or the file has become shorter since it was opened.
        """
        if start < 0 or size < 0 or start + size > self.size:
            raise self._kind(f"{self.path} has {self.size} bytes; {size} from byte {start} on are not among them")
        buffer = bytearray(size)
        self.fill(memoryview(buffer), start)
        return buffer

    def fill(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer of bytes with those from `start`.

        Raises:
            kind: as `read`.
        """
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(self._descriptor, [buffer[done:]], start + done)
                if count == 0:
                    raise self._kind(f"{self.path} was cut while it was read; copy it again")
                done += count
        except OSError as error:
            raise self._kind(f"{self.path} cannot be read ({_reason(error)})") from error

    def stream(self) -> IO[bytes]:
        """The file as a seekable stream, for a library that wants one. It stays open when this is closed."""
        return os.fdopen(os.dup(self._descriptor), "rb")

    def close(self) -> None:
        """Let go of it; harmless when done twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RegularFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_file(path: str | os.PathLike[str], kind: type[InputError], *, most_bytes: int = MOST_BYTES) -> bytes:
    """All bytes of a file.

    Raises:
        kind: as `RegularFile` does, and when the file has more than `most_bytes`.
    """
    with RegularFile(path, kind) as file:
        if file.size > most_bytes:
            raise kind(f"{file.path} has {file.size} bytes; expected {most_bytes} at most")
        return bytes(file.read(0, file.size))


def read_text(path: str | os.PathLike[str], kind: type[InputError], *, most_bytes: int = MOST_BYTES) -> str:
    """All text of a UTF-8 file.

    Raises:
        kind: as `read_file` does, and when the bytes are not UTF-8.
    """
    try:
        return read_file(path, kind, most_bytes=most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start})") from error


def parse_json(text: str | bytes | bytearray, kind: type[ForerouteError], *, name: str) -> Any:
    """The value of a JSON text from outside.

    Args:
        text: UTF-8 when it is bytes.
        kind: the error to raise.
        name: of the text, such as its path, for the message.

    Raises:
        kind: when it is no JSON, nested deeper than the interpreter's stack, or has an integer of
            thousands of digits.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise kind(f"{name} is not text in UTF-8 ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise kind(f"{name} is not JSON ({error})") from error
    except RecursionError as error:
        raise kind(f"{name} is not JSON that can be read: it is nested too deep") from error


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
        path: the file.
        kind: the error to raise.
        most_header_bytes: a longer header is refused. A parsed one takes about 25 times its bytes of memory at most.

    Attributes:
        path: the file.
        metadata: its strings by name.
        tensors: what the header says of each tensor, by name.

    Raises:
        kind: when it cannot be opened, or is not a whole safetensors file.
    """

    def __init__(
        self, path: str | os.PathLike[str], kind: type[InputError], *, most_header_bytes: int = MOST_HEADER_BYTES
    ) -> None:
        self._file, self._kind = RegularFile(path, kind), kind
        self.path = self._file.path
        try:
            self.metadata, self.tensors = self._read_header(most_header_bytes)
        except BaseException:
            self._file.close()
            raise

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self.tensors)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of a tensor, little-endian."""
        return self.tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self.tensors[name].shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """A tensor, or of its first axis the part from `start` to `stop`.

        Raises:
            kind: when the file was cut meanwhile, or the part is not in the tensor.
        """
        tensor = self.tensors[name]
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

    def read_all(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Several whole tensors by name.

        Raises:
            kind: as `read`.
        """
        return {name: self.read(name) for name in names}

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self, most_bytes: int) -> tuple[dict[str, str], dict[str, StoredTensor]]:
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
            tensors[name] = StoredTensor(tensor.dtype, tensor.shape, end)
            end = begin + after
        if end != size:
            raise self._wrong(f"its header describes {end} bytes, it has {size}")
        return metadata, tensors

    def _entry(self, name: str, entry: Any) -> tuple[int, int, StoredTensor]:
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
        return offsets[0], offsets[1], StoredTensor(DTYPES[dtype], tuple(shape), 0)

    def _wrong(self, why: str) -> InputError:
        return self._kind(f"{self.path} is not a whole safetensors file: {why}. It may be truncated; copy it again")


def seal_file(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> str:
    """XXH3-128, as hex, over metadata and small tensors, both in order of name.

    Each part is preceded by its name and size, so that no part can pass for another. Like all seals here it finds
    damage and mix-ups at memory speed, and is no signature: whoever can write the file can seal it again.
    """
    from xxhash import xxh3_128

    state = xxh3_128()
    for name in sorted(metadata):
        value = metadata[name].encode()
        state.update(f"{name}:{len(value)}:".encode() + value)
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        shape = "x".join(map(str, tensor.shape))
        state.update(f"{name}:{tensor.dtype.str.lstrip('<|')}:{shape}:".encode())
        state.update(tensor.tobytes())
    return state.hexdigest()


def seal_slices(words: NDArray[np.uint64], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
    """16 bytes for each slice: XXH3-128 of its words, joined.

    Args:
        words: uint64 [Z], little-endian.
        starts: int64 [C], where each slice begins.
        sizes: int64 [C], its words.
    """
    from xxhash import xxh3_128_digest

    view = words.data
    ends = (starts + sizes).tolist()
    return b"".join([xxh3_128_digest(view[a:b]) for a, b in zip(starts.tolist(), ends, strict=True)])


def seal_arrays(*arrays: NDArray[Any]) -> bytes:
    """16 bytes: XXH3-128 of the bytes of arrays, one after another. Their types and shapes must be known."""
    from xxhash import xxh3_128

    state = xxh3_128()
    for array in arrays:
        state.update(np.ascontiguousarray(array).data)
    return state.digest()


def is_text(value: object) -> bool:
    """Whether it is a string that can be written as UTF-8: JSON can name halves of characters, which cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _what(mode: int) -> str:
    for test, name in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if test(mode):
            return name
    return "no regular file"


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MOST_TENSOR_BYTES for value in values)

"""The protocol between a trainer and the engine worker that it started: one frame out, one frame back.

    ┌───────┬──────────────┬────────────────────┬──────────────────────────────┐
    │ "FRM1"│ length, u32  │ header, UTF-8 JSON │ the bytes of each array      │
    └───────┴──────────────┴────────────────────┴──────────────────────────────┘

The header is an object; its "arrays" lists name, dtype and shape of what follows, C order, little endian. Its "request"
is a number, which the answer repeats: an answer to an earlier request cannot pass for one to this. Nothing in a frame
is executed, and every size is checked before memory is taken.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import EngineError
from foreroute.files import parse_json

MAGIC = b"FRM1"
MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 36
"""Routes of 2,048 sequences of 8k tokens over 60 layers with 8 picks are a tenth of this."""
DTYPES = ("uint8", "uint16", "int32", "int64", "float32")
_PREFIX = struct.Struct("<4sI")


@dataclass(frozen=True, eq=False)
class Frame:
    """A message.

    Attributes:
        header: plain JSON data.
        arrays: by name, of the dtypes above.
    """

    header: dict[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def send_frame(channel: socket.socket, frame: Frame, *, timeout_s: float | None = None) -> None:
    """Write one frame.

    Args:
        channel: a stream socket.
        frame: what to send.
        timeout_s: for the whole frame; None waits for ever.

    Raises:
        TimeoutError: when the other side does not take it in time.
        OSError: when the other side is gone.
        TypeError: for an array of another dtype.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in frame.arrays.items()}
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise TypeError(f"array {name} has dtype {array.dtype}; a frame holds {', '.join(DTYPES)}")
    table = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({**frame.header, "arrays": table}).encode()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    parts: list[Any] = [array.reshape(-1).view(np.uint8).data for array in arrays.values()]
    for part in (_PREFIX.pack(MAGIC, len(header)) + header, *parts):
        _set_deadline(channel, deadline)
        channel.sendall(part)


def receive_frame(channel: socket.socket, *, timeout_s: float | None = None) -> Frame:
    """Read one frame.

    Args:
        channel: a stream socket.
        timeout_s: for the whole frame; None waits for ever.

    Raises:
        TimeoutError: when the frame is not there in time.
        EOFError: when the other side is gone.
        EngineError: when what came is no frame.
    """
    read = _reader(channel, timeout_s)
    magic, length = _PREFIX.unpack(read(_PREFIX.size))
    if magic != MAGIC or length > MAX_HEADER_BYTES:
        raise EngineError(f"{bytes(magic)!r} and a header of {length} bytes begin no frame; expected {MAGIC!r}")
    try:
        header = parse_json(read(length), EngineError, name="it")
        table = [_described(*entry) for entry in header.pop("arrays")]
    except (EngineError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f"the header of a frame cannot be read: {error}") from error
    if sum(size for *_, size in table) > MAX_BODY_BYTES:
        raise EngineError(f"a frame announces more than {MAX_BODY_BYTES} bytes; expected less")
    return Frame(header, {name: np.frombuffer(read(size), dtype).reshape(shape) for name, dtype, shape, size in table})


def _described(name: Any, dtype: Any, shape: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], int]:
    if not isinstance(name, str) or dtype not in DTYPES:
        raise ValueError(f"array {name!r:.40} of dtype {dtype!r:.40}; expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 4 or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"array {name!r:.40} has shape {shape!r:.60}")
    return name, np.dtype(dtype), tuple(shape), prod(shape) * np.dtype(dtype).itemsize


def _reader(channel: socket.socket, timeout_s: float | None) -> Callable[[int], bytearray]:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def read(size: int) -> bytearray:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            _set_deadline(channel, deadline)
            count = channel.recv_into(view[filled:])
            if not count:
                raise EOFError("the other side closed the channel")
            filled += count
        return data

    return read


def _set_deadline(channel: socket.socket, deadline: float | None) -> None:
    # a timeout of 0 would mean "do not block"
    channel.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))

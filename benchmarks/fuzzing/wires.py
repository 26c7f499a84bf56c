"""Every text or byte wire of the capture room with a valid sample and its decoder, and frames of engine workers.

Only `ForerouteError` may come out. No wire has a checksum: a byte of the payload that turns one plausible row into
another cannot be noticed by any reader. What can be noticed is named by `FuzzTarget.redundant`, the spans of a sample
where every change must be refused or change no route.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzzing.mutations import damage, forge_text
from benchmarks.fuzzing.target import Target
from benchmarks.fuzzing.traces import require_possible
from benchmarks.harness import wires
from foreroute import RoutingTrace
from foreroute.capture import decode
from foreroute.engines.vllm.ipc import Frame, receive_frame, send_frame
from foreroute.errors import EngineError

_SAMPLE = wires.rollout(np.random.default_rng(7))


@dataclass(frozen=True)
class FuzzTarget:
    """One decoder under attack.

    Attributes:
        name: the wire.
        make_valid: draws a valid sample.
        decode: reads a sample, valid or not.
        redundant: (start, stop) character spans of a sample in which the wire repeats itself.
    """

    name: str
    make_valid: Callable[[np.random.Generator], bytes]
    decode: Callable[[bytes], RoutingTrace]
    redundant: Callable[[bytes], list[tuple[int, int]]]


def wire_targets(folder: Path) -> list[Target]:
    """All of `targets`, and frames."""

    def checked(raw: bytes, trace: RoutingTrace) -> None:
        require_possible(trace)
        assert trace.num_rows == len(_SAMPLE.tokens)

    found = [
        Target(
            name=f"wire, {wire.name}",
            make=wire.make_valid,
            read=wire.decode,
            same=lambda a, b: a.equals(b),
            forge=_forge,
            check=checked,
        )
        for wire in targets()
    ]
    frames = Target("frame", _frame, _read_frame, _same_frame, check=_require_frame)
    return [*found, frames]


def targets() -> list[FuzzTarget]:
    """All wires that arrive as text or bytes."""
    r = _SAMPLE
    npy = wires.npy(r.all_layers().astype(np.uint8))
    return [
        _target("vllm-http", wires.vllm_http(r), base64.b64encode(npy[:120]).decode()),
        _target("npy", npy, "'descr': '|u", "'shape': (11, 5, 3)"),
        _target("sglang", wires.sglang(r)),
        _target("sglang-openai", wires.sglang_openai(r)),
    ]


def expected() -> RoutingTrace:
    """The routes of every valid sample."""
    r = _SAMPLE
    return RoutingTrace.from_sequences(r.spec, [r.tokens], [r.routes_RLK])


def _target(name: str, valid: str | bytes, *redundant: str) -> FuzzTarget:
    sample = valid.encode() if isinstance(valid, str) else valid

    def spans(data: bytes) -> list[tuple[int, int]]:
        found = [(data.find(part.encode()), len(part)) for part in redundant]
        return [(start, start + length) for start, length in found if start >= 0]

    def read(data: bytes) -> RoutingTrace:
        return decode(data, model=_SAMPLE.spec, token_ids=_SAMPLE.tokens)

    return FuzzTarget(name, lambda rng: sample, read, spans)


def _forge(raw: bytes, rng: np.random.Generator) -> bytes:
    try:
        return forge_text(raw.decode(), rng).encode()
    except UnicodeError:  # no text, or one with a lone surrogate
        return damage(raw, rng)


def _frame(rng: np.random.Generator) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rows = rng.integers(0, 9, (int(rng.integers(1, 9)), 3)).astype(np.uint8)
        send_frame(ours, Frame({"kind": "answer", "count": 3}, {"routes": rows, "logprobs": np.ones(4, np.float32)}))
        ours.shutdown(socket.SHUT_WR)
        raw = bytearray()
        while piece := theirs.recv(1 << 16):
            raw += piece
        return bytes(raw)


def _read_frame(raw: bytes) -> Frame:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(raw)
        ours.shutdown(socket.SHUT_WR)
        try:
            return receive_frame(theirs, timeout_s=5.0)
        except EOFError as error:  # a channel that ends is not a frame, and its owner says which process died
            raise EngineError("the channel was closed") from error


def _same_frame(a: Frame, b: Frame) -> bool:
    return (
        a.header == b.header
        and a.arrays.keys() == b.arrays.keys()
        and all(a.arrays[n].dtype == b.arrays[n].dtype and np.array_equal(a.arrays[n], b.arrays[n]) for n in a.arrays)
    )


def _require_frame(raw: bytes, frame: Any) -> None:
    assert isinstance(frame.header, dict)
    assert sum(array.nbytes for array in frame.arrays.values()) <= len(raw)

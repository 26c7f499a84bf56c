"""What a fuzzer needs to attack the capture room: for every text or byte wire a valid sample and its decoder.

A runner mutates `target.make_valid(rng)` and calls `target.decode`. Only `ForerouteError` may come out. No wire has a
checksum: a byte of the payload that turns one plausible row into another cannot be noticed by any reader. What can be
noticed is named by `target.redundant`, the spans of a sample where every change must be refused or change no route.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks import wires
from foreroute import RoutingTrace
from foreroute.capture import decode

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


def targets() -> list[FuzzTarget]:
    """All wires that arrive as text or bytes."""
    r = _SAMPLE
    npy = wires.npy(r.all_layers().astype(np.uint8))
    return [
        _target("vllm-http", wires.vllm_http(r), base64.b64encode(npy[:120]).decode()),
        _target("vllm-split-json", wires.vllm_split_json(r), "[[[", ", [[", "]]]"),
        _target("npy", npy, "'descr': '|u", "'shape': (11, 5, 3)"),
        _target("sglang", wires.sglang(r)),
        _target("sglang-openai", wires.sglang_openai(r)),
        _target("sglang-jax", wires.sglang_jax(r)),
        _target("nemo-rl", wires.nemo_rl(r), "nrlre1:int8:12x4x3:"),
        _target("prime-rl", wires.prime_rl(r), '"shape": [11, 5, 3]', '"dtype": "uint8"', '"start": 0'),
        _target("skyrl", wires.skyrl(r), '"shape":[11,5,3]', '"dtype":"uint8"'),
        _target("lists", str(r.routes_RLK.tolist()), "[[["),
    ]


def expected() -> RoutingTrace:
    """The routes of every valid sample."""
    r = _SAMPLE
    return RoutingTrace.from_sequences(r.facts.spec, [r.tokens], [r.routes_RLK])


def _target(name: str, valid: str | bytes, *redundant: str) -> FuzzTarget:
    sample = valid.encode() if isinstance(valid, str) else valid

    def spans(data: bytes) -> list[tuple[int, int]]:
        found = [(data.find(part.encode()), len(part)) for part in redundant]
        return [(start, start + length) for start, length in found if start >= 0]

    def read(data: bytes) -> RoutingTrace:
        return decode(data, model=_SAMPLE.facts, token_ids=_SAMPLE.tokens)

    return FuzzTarget(name, lambda rng: sample, read, spans)

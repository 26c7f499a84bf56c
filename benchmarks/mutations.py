"""Malformed inputs from valid ones: damage to bytes, and forged trace files whose seals are right."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXTREMES = (0, 1, 2, 7, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def damage(raw: bytes, rng: np.random.Generator) -> bytes:
    """One to three random changes of the bytes; the result may happen to be equal."""
    for _ in range(int(rng.integers(1, 4))):
        if raw:
            raw = DAMAGES[int(rng.integers(len(DAMAGES)))](raw, rng)
    return raw


def forge(raw: bytes, rng: np.random.Generator) -> bytes:
    """A trace file with one to three changed fields, sealed again, as someone with this library could make it."""
    from safetensors.numpy import load, save

    tensors, metadata = load(raw), dict(_metadata(raw))
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.25:
            name = sorted(metadata)[int(rng.integers(len(metadata)))]
            metadata[name] = damage(metadata[name].encode(), rng).decode("utf-8", "replace")
        else:
            name = sorted(tensors)[int(rng.integers(len(tensors)))]
            tensors[name] = _changed(tensors[name], rng)
    forged: bytes = save(_sealed(tensors, metadata), metadata=metadata)
    return forged


def _flip_bit(raw: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(raw)
    changed[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def _set_byte(raw: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(raw)
    changed[int(rng.integers(len(raw)))] = int(rng.integers(256))
    return bytes(changed)


def _truncate(raw: bytes, rng: np.random.Generator) -> bytes:
    return raw[: int(rng.integers(len(raw)))]


def _extend(raw: bytes, rng: np.random.Generator) -> bytes:
    return raw + rng.bytes(int(rng.integers(1, 64)))


def _cut_out(raw: bytes, rng: np.random.Generator) -> bytes:
    start, size = int(rng.integers(len(raw))), int(rng.integers(1, 64))
    return raw[:start] + raw[start + size :]


def _copy_over(raw: bytes, rng: np.random.Generator) -> bytes:
    source, target = (int(x) for x in rng.integers(len(raw), size=2))
    piece = raw[source : source + int(rng.integers(1, 256))]
    return (raw[:target] + piece + raw[target + len(piece) :])[: len(raw)]


def _zero_out(raw: bytes, rng: np.random.Generator) -> bytes:
    start, size = int(rng.integers(len(raw))), int(rng.integers(1, 256))
    return raw[:start] + bytes(len(raw[start : start + size])) + raw[start + size :]


def _plant_number(raw: bytes, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(raw))) // 8 * 8
    number = struct.pack("<Q", EXTREMES[int(rng.integers(len(EXTREMES)))])
    return (raw[:start] + number + raw[start + 8 :])[: max(len(raw), start + 8)]


def _change_digit(raw: bytes, rng: np.random.Generator) -> bytes:
    head = np.frombuffer(raw[:4096], np.uint8)
    digits = np.flatnonzero((head >= ord("0")) & (head <= ord("9")))
    if not len(digits):
        return raw
    place = int(rng.choice(digits))
    return raw[:place] + str(rng.integers(10 ** int(rng.integers(1, 12)))).encode() + raw[place + 1 :]


DAMAGES: tuple[Callable[[bytes, np.random.Generator], bytes], ...] = (
    _flip_bit,
    _set_byte,
    _truncate,
    _extend,
    _cut_out,
    _copy_over,
    _zero_out,
    _plant_number,
    _change_digit,
)


def _metadata(raw: bytes) -> dict[str, str]:
    size = struct.unpack("<Q", raw[:8])[0]
    metadata: dict[str, str] = json.loads(raw[8 : 8 + size])["__metadata__"]
    return metadata


def _changed(tensor: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    kind = rng.random()
    if kind < 0.1 or not tensor.size:
        return np.resize(tensor, tensor.size + 1) if tensor.ndim == 1 else tensor.reshape(-1)
    if kind < 0.2:
        return tensor[:-1].copy()
    if kind < 0.3:
        with np.errstate(invalid="ignore"):  # of numbers that an integer cannot hold
            return tensor.astype(("<i4", "|u1", "<i8", "<u8")[int(rng.integers(4))])
    flat = tensor.reshape(-1).copy()
    words = flat.view(f"u{flat.itemsize}")
    for place in rng.integers(flat.size, size=int(rng.integers(1, 5))):
        near = int(words[place]) + int(rng.integers(-2, 3))
        number = near if rng.random() < 0.5 else EXTREMES[int(rng.integers(len(EXTREMES)))]
        words[place] = number % (1 << 8 * flat.itemsize)
    return flat.reshape(tensor.shape)


def _sealed(tensors: dict[str, NDArray[Any]], metadata: dict[str, str]) -> dict[str, NDArray[Any]]:
    """Right seals wherever the changed tables still allow to compute them."""
    from foreroute.trace.index import BULK
    from foreroute.trace.seal import seal_file, seal_payloads, seal_rows

    try:
        sizes = tensors["payload_words"].reshape(-1).astype(np.int64)
        seals = seal_payloads(tensors["payloads"], np.cumsum(sizes) - sizes, sizes)
        tensors["payload_seals"] = np.frombuffer(seals, np.uint8).reshape(*tensors["payload_words"].shape, 16)
        starts = tensors["block_starts"].tolist()
        valid = np.unpackbits(tensors["valid_bits"], bitorder="little").astype(np.bool_)
        rows = [seal_rows(tensors["token_ids"][a:b], valid[a:b]) for a, b in pairwise(starts)]
        tensors["row_seals"] = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16)
    except (KeyError, ValueError, TypeError, OverflowError, MemoryError):
        pass
    ours = {k: v for k, v in metadata.items() if k.startswith("foreroute.") and k != "foreroute.digest"}
    metadata["foreroute.digest"] = seal_file(ours, {k: v for k, v in tensors.items() if k not in BULK})
    return tensors

"""Malformed inputs from valid ones: damage to bytes, and forgeries whose syntax and checksums are right."""

import json
import struct

import numpy as np
from safetensors.numpy import load, save

from foreroute.files.container import checksum

EXTREMES = (0, 1, 2, 7, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
HOSTILE = (
    *(0, 1, -1, 2, 3, 255, 256, 2**16, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, -1e308, 2.0, 1e18),
    *(True, False, None, "", "0", "1", "..", "\0", "a\x1b[2J", "\ud800", "\u202e", "x" * 5_000, "\n", "1e9"),
    *([], {}, [[]], [0], [-1, 2], {"a": 1}, [None], ["x"], [[[[[[1]]]]]], [0] * 300, {"": 0}),
)
"""Values that are of the wrong type, out of range, or hostile to who prints or counts them."""


def damage(raw, rng):
    """One to three random changes of the bytes; the result may happen to be equal."""
    for _ in range(int(rng.integers(1, 4))):
        if raw:
            raw = _one_of(DAMAGES, rng)(raw, int(rng.integers(len(raw))), rng)
    return raw


def forge(raw, rng, apart=()):
    """A file with one to three changed fields and a right checksum, which is not of the tensors `apart`."""
    tensors, metadata = load(raw), metadata_of(raw)
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.25:
            name = _one_of(sorted(metadata), rng)
            metadata[name] = forge_text(metadata[name], rng)
        else:
            name = _one_of(sorted(tensors), rng)
            tensors[name] = _changed(tensors[name], rng)
    put_checksum_right(tensors, metadata, apart)
    return save(tensors, metadata=metadata)


def metadata_of(raw):
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size])["__metadata__"]


def put_checksum_right(tensors, metadata, apart=()):
    """Put the right checksum into metadata of any format, if there can be one."""
    ours = {k: v for k, v in metadata.items() if k.startswith("foreroute.") and k != "foreroute.checksum"}
    try:
        covered = {name: tensor for name, tensor in tensors.items() if name not in apart}
        metadata["foreroute.checksum"] = checksum(ours, covered)
    except UnicodeEncodeError:  # half a character, which no file can hold
        metadata["foreroute.checksum"] = ""


def forge_text(text, rng):
    """A text whose syntax is right and whose values are not, if it is JSON; else a damaged text."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if values is None or rng.random() < 0.25:
        return damage(text.encode(), rng).decode("utf-8", "replace")
    return json.dumps(forge_values(values, rng))


def forge_json(raw, rng):
    """`forge_text` of bytes; damage where they are no text, or one with a lone surrogate."""
    try:
        return forge_text(raw.decode(), rng).encode()
    except UnicodeError:
        return damage(raw, rng)


def forge_line(raw, rng):
    """One line forged, dropped, doubled or moved."""
    lines = raw.split(b"\n")[:-1]
    place = int(rng.integers(len(lines)))
    chosen = rng.random()
    if chosen < 0.1:
        del lines[place]
    elif chosen < 0.2:
        lines.append(lines[place])
    else:
        lines[place] = forge_json(lines[place], rng)
    return b"\n".join(lines) + b"\n"


def forge_values(values, rng):
    """JSON or TOML values with one to three leaves or tables replaced, dropped, doubled or renamed."""
    values = json.loads(json.dumps(values))
    for _ in range(int(rng.integers(1, 4))):
        values = _forged_at(values, rng, depth=int(rng.integers(0, 5)))
    return values


def _put(raw, at, piece):
    """The bytes with others in their place from there on; as many as before."""
    return (raw[:at] + piece + raw[at + len(piece) :])[: len(raw)]


def _other_number(raw, at, rng):
    """Another number for a digit of the head."""
    digits = [place for place, byte in enumerate(raw[:4096]) if 48 <= byte < 58] or [at]
    place = digits[int(rng.integers(len(digits)))]
    return raw[:place] + str(rng.integers(10 ** int(rng.integers(1, 12)))).encode() + raw[place + 1 :]


DAMAGES = (
    lambda raw, at, rng: _put(raw, at, bytes([raw[at] ^ 1 << int(rng.integers(8))])),
    lambda raw, at, rng: _put(raw, at, rng.bytes(1)),
    _other_number,
    lambda raw, at, rng: raw[:at],
    lambda raw, at, rng: raw + rng.bytes(int(rng.integers(1, 64))),
    lambda raw, at, rng: raw[:at] + raw[at + int(rng.integers(1, 64)) :],
    lambda raw, at, rng: _put(raw, int(rng.integers(len(raw))), raw[at : at + int(rng.integers(1, 256))]),
    lambda raw, at, rng: _put(raw, at, bytes(int(rng.integers(1, 256)))),
    lambda raw, at, rng: _put(raw, at // 8 * 8, struct.pack("<Q", _extreme(rng))),
)


def _changed(tensor, rng):
    """A tensor of another size, shape or type, with a few other numbers, or a whole other column."""
    change, flat = int(rng.integers(10)), tensor.reshape(-1).copy()
    if change == 0 or not tensor.size:
        return np.resize(tensor, tensor.size + 1) if tensor.ndim == 1 else tensor.reshape(-1)
    if change == 1:
        return np.atleast_1d(tensor)[:-1].copy()
    if change == 2:
        with np.errstate(invalid="ignore"):  # of numbers that an integer cannot hold
            return tensor.astype(_one_of(("<i4", "|u1", "<i8", "<u8"), rng))
    words, bits = flat.view(f"u{flat.itemsize}"), 8 * flat.itemsize
    if change == 3:  # differences of neighbours wrap to something small, and the ends stay
        words[1:-1] = np.array([_staircase(i, bits, rng) for i in range(max(len(words) - 2, 0))], np.uint64)
    elif change == 4:  # lengths whose sum wraps to what it was
        total = int(words.sum(dtype=np.uint64))
        words[:] = np.array([_extreme(rng) % (1 << bits) for _ in words], np.uint64)
        words[-1] = (total - int(words[:-1].astype(object).sum())) % (1 << bits)
    elif change == 5:
        words[:] = rng.permutation(words)
    elif change == 6:
        words[:] = _extreme(rng) % (1 << bits)
    else:
        for place in rng.integers(flat.size, size=int(rng.integers(1, 5))):
            near = int(words[place]) + int(rng.integers(-2, 3))
            words[place] = (near if rng.random() < 0.5 else _extreme(rng)) % (1 << bits)
    return flat.reshape(tensor.shape)


def _staircase(step, bits, rng):
    """2^63 - 1, -2^63, -1, then small numbers: each larger than the one before if differences wrap."""
    top = 1 << (bits - 1)
    return (top - 1, top, 2 * top - 1, int(rng.integers(0, 8)))[step % 4]


def _extreme(rng):
    return _one_of(EXTREMES, rng)


def _one_of(values, rng):
    return values[int(rng.integers(len(values)))]


def _forged_at(values, rng, depth):
    if depth and isinstance(values, dict) and values:
        key = _one_of(list(values), rng)
        chosen = rng.random()
        if chosen < 0.05:
            return {name: value for name, value in values.items() if name != key}
        if chosen < 0.1:
            return {**values, str(_one_of(HOSTILE, rng))[:40]: values[key]}
        return {**values, key: _forged_at(values[key], rng, depth - 1)}
    if depth and isinstance(values, list) and values:
        place = int(rng.integers(len(values)))
        if rng.random() < 0.1:
            return [*values, values[place]] if rng.random() < 0.5 else values[:place] + values[place + 1 :]
        return [*values[:place], _forged_at(values[place], rng, depth - 1), *values[place + 1 :]]
    if isinstance(values, bool | str) or values is None or rng.random() < 0.7:
        return _one_of(HOSTILE, rng)
    return values + int(rng.integers(-2, 3)) if isinstance(values, int | float) else values

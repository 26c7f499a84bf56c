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
ALIKE = (b"0123456789", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
"""Characters that stand in for each other: a text of digits, names or base64 stays one."""


def damage(raw, rng):
    """One to three random changes of the bytes; the result may happen to be equal."""
    for _ in range(int(rng.integers(1, 4))):
        if raw:
            raw = DAMAGES[int(rng.integers(len(DAMAGES)))](raw, rng)
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
            tensors[name] = _changed(tensors[name], rng) if rng.random() < 0.5 else _replaced(tensors[name], rng)
    put_checksum_right(tensors, metadata, apart)
    return save(tensors, metadata=metadata)


def metadata_of(raw):
    """Of a safetensors file."""
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


def forge_values(values, rng):
    """JSON or TOML values with one to three leaves or tables replaced, dropped, doubled or renamed."""
    values = json.loads(json.dumps(values))
    for _ in range(int(rng.integers(1, 4))):
        values = _forged_at(values, rng, depth=int(rng.integers(0, 5)))
    return values


def _flip_bit(raw, rng):
    place = int(rng.integers(len(raw)))
    return _with_byte(raw, place, raw[place] ^ 1 << int(rng.integers(8)))


def _set_byte(raw, rng):
    return _with_byte(raw, int(rng.integers(len(raw))), int(rng.integers(256)))


def _with_byte(raw, place, byte):
    return raw[:place] + bytes([byte]) + raw[place + 1 :]


def _exchange_character(raw, rng):
    place = int(rng.integers(len(raw)))
    alike = next((each for each in ALIKE if raw[place] in each), b"+/")
    return _with_byte(raw, place, alike[int(rng.integers(len(alike)))])


def _truncate(raw, rng):
    return raw[: int(rng.integers(len(raw)))]


def _extend(raw, rng):
    return raw + rng.bytes(int(rng.integers(1, 64)))


def _cut_out(raw, rng):
    start, size = int(rng.integers(len(raw))), int(rng.integers(1, 64))
    return raw[:start] + raw[start + size :]


def _copy_over(raw, rng):
    source, target = (int(x) for x in rng.integers(len(raw), size=2))
    piece = raw[source : source + int(rng.integers(1, 256))]
    return (raw[:target] + piece + raw[target + len(piece) :])[: len(raw)]


def _zero_out(raw, rng):
    start, size = int(rng.integers(len(raw))), int(rng.integers(1, 256))
    return raw[:start] + bytes(len(raw[start : start + size])) + raw[start + size :]


def _plant_number(raw, rng):
    start = int(rng.integers(len(raw))) // 8 * 8
    return (raw[:start] + struct.pack("<Q", _extreme(rng)) + raw[start + 8 :])[: max(len(raw), start + 8)]


def _change_digit(raw, rng):
    head = np.frombuffer(raw[:4096], np.uint8)
    digits = np.flatnonzero((head >= ord("0")) & (head <= ord("9")))
    if not len(digits):
        return raw
    place = int(rng.choice(digits))
    return raw[:place] + str(rng.integers(10 ** int(rng.integers(1, 12)))).encode() + raw[place + 1 :]


DAMAGES = (
    _flip_bit,
    _set_byte,
    _exchange_character,
    _truncate,
    _extend,
    _cut_out,
    _copy_over,
    _zero_out,
    _plant_number,
    _change_digit,
)


def _changed(tensor, rng):
    """A tensor of another size, shape or type, or with a few other numbers."""
    kind = rng.random()
    if kind < 0.1 or not tensor.size:
        return np.resize(tensor, tensor.size + 1) if tensor.ndim == 1 else tensor.reshape(-1)
    if kind < 0.2:
        return np.atleast_1d(tensor)[:-1].copy()
    if kind < 0.3:
        with np.errstate(invalid="ignore"):  # of numbers that an integer cannot hold
            return tensor.astype(_one_of(("<i4", "|u1", "<i8", "<u8"), rng))
    flat = tensor.reshape(-1).copy()
    words = flat.view(f"u{flat.itemsize}")
    for place in rng.integers(flat.size, size=int(rng.integers(1, 5))):
        near = int(words[place]) + int(rng.integers(-2, 3))
        words[place] = (near if rng.random() < 0.5 else _extreme(rng)) % (1 << 8 * flat.itemsize)
    return flat.reshape(tensor.shape)


def _replaced(tensor, rng):
    """A whole column that keeps its type and shape: staircases that wrap, extremes, permutations, constants."""
    flat = tensor.reshape(-1).copy()
    if not flat.size:
        return tensor
    words = flat.view(f"u{flat.itemsize}")
    bits = 8 * flat.itemsize
    kind = int(rng.integers(7))
    if kind == 0:  # differences of neighbours wrap to something small, and the ends stay
        words[1:-1] = np.array([_staircase(i, bits, rng) for i in range(max(len(words) - 2, 0))], np.uint64)
    elif kind == 1:  # lengths whose sum wraps to what it was
        total = int(words.sum(dtype=np.uint64))
        words[:] = np.array([_extreme(rng) % (1 << bits) for _ in words], np.uint64)
        words[-1] = (total - int(words[:-1].astype(object).sum())) % (1 << bits)
    elif kind == 2:
        words[:] = np.array([_extreme(rng) % (1 << bits) for _ in words], np.uint64)
    elif kind == 3:
        words[:] = rng.permutation(words)
    elif kind == 4:
        words[:] = words[::-1].copy()
    elif kind == 5:
        words[:] = _extreme(rng) % (1 << bits)
    else:
        words[:] = rng.integers(0, 1 << min(bits, 62), len(words), dtype=np.uint64)
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

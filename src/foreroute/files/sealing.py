"""Checksums of the formats before the shared container. This goes when the last of them has moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


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

"""Checksums of a trace file: one per block and layer, one per block's tokens, and one over all of those.

XXH3-128 finds damage and mix-ups at memory speed. It is no signature: whoever can write the file can seal it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEAL_BYTES = 16


def seal_payloads(words: NDArray[np.uint64], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
    """16 bytes per payload: XXH3-128 of its words, little-endian, joined.

    Args:
        words: uint64 [Z].
        starts: int64 [C], where each payload begins.
        sizes: int64 [C], its words.
    """
    from xxhash import xxh3_128_digest

    view = words.data
    ends = (starts + sizes).tolist()
    return b"".join([xxh3_128_digest(view[a:b]) for a, b in zip(starts.tolist(), ends, strict=True)])


def seal_rows(token_ids: NDArray[np.int32], valid: NDArray[np.bool_]) -> bytes:
    """XXH3-128 of the tokens of a block, int32 little-endian, then one byte 0 or 1 per row for validity."""
    from xxhash import xxh3_128

    state = xxh3_128(np.ascontiguousarray(token_ids, "<i4").data)
    state.update(np.ascontiguousarray(valid).data)
    return state.digest()


def seal_file(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> str:
    """XXH3-128, as hex, over metadata and small tensors, both in order of name.

    Each part is preceded by its name and size, so that no part can pass for another.
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

"""What the writer and the reader of trace files share: names and types of what is in a file, and its limits.

`docs/formats.md` is the format; its picture stands in `trace.file`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 2
KEY = "foreroute."
METADATA = tuple(KEY + name for name in ("version", "spec", "codec", "pick_order", "streams", "provenance", "digest"))
SHAPES: dict[str, tuple[str, int]] = {
    "run_offsets": ("<i8", 1),
    "run_starts": ("<i8", 1),
    "run_lengths": ("<i8", 1),
    "block_starts": ("<i8", 1),
    "span_starts": ("<i8", 1),
    "span_versions": ("<i4", 1),
    "payload_words": ("<u4", 2),
    "payload_seals": ("|u1", 3),
    "row_seals": ("|u1", 2),
}
BULK = {"token_ids": "<i4", "valid_bits": "|u1", "payloads": "<u8"}
TABLES = {"code_lengths": ("|u1", 2)}
"""What only some codecs have."""
STREAM_SHAPES: dict[str, tuple[str, int]] = {"payload_words": ("<u4", 2), "payload_seals": ("|u1", 3)}
STREAM_COUNTS = {"id_counts": ("<i8", 2)}
"""Tables of each stream, and of each one of sets. Their names begin with that of the stream and a dot."""
SETS, CHANGES, FLOATS = "rice", "rice-changes", "float32"
"""The codecs of streams: of sets, of sets that resemble those of the row before, and of gate weights."""
MOST_STREAMS = 16
MOST_HEADER_BYTES = 1 << 20
"""Of the safetensors header: a parsed one takes far more memory than its bytes."""
MAX_EXPANSION = 64
"""A trace has at most so many times the rows that its file stores, for the same reason. A writer stores a prefix again
rather than go beyond that."""
SEAL_BYTES = 16
"""Of XXH3-128, which finds damage and mix-ups at memory speed. Whoever can write the file can seal it again."""

ORDER = {True: "kept", False: "dropped"}
"""`foreroute.pick_order`."""


def is_bulk(name: str) -> bool:
    """Say whether a tensor is read in part, and so has seals of its own and no place in the file's digest."""
    return name in BULK or name.endswith(".payloads")


@dataclass(frozen=True)
class StoredRuns:
    """How S sequences are chained from U stored rows. Sequences that begin alike share the runs of their prefix.

    Attributes:
        offsets: int64 [S + 1], sequence s is the runs `offsets[s]:offsets[s + 1]`, joined.
        starts: int64 [Q], first stored row of each run.
        lengths: int64 [Q], rows of each run, at least 1.
        edges: int64 [Q + 1], where each run begins among the rows of all sequences, and how many those are.
    """

    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    edges: NDArray[np.int64]

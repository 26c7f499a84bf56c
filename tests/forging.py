"""Trace files with changed content and right seals, as anybody with this library could make them."""

from itertools import pairwise

import numpy as np
from safetensors.numpy import save as to_bytes

from foreroute.files import seal_arrays, seal_file, seal_slices
from foreroute.trace.file.format import BULK
from foreroute.trace.file.writing import encode_trace

STAIRCASE = [0, 2**63 - 1, -(2**63), -1]
"""Each step but one is upwards, and int64 differences of all of them are: they wrap."""


def forged(path, trace, change, *, codec="packed"):
    """Write the file of `trace` after `change(metadata, tensors)`, sealed anew wherever seals can be computed."""
    metadata, tensors = encode_trace(trace, codec)
    metadata.pop("foreroute.digest")
    tensors = {name: tensor.copy() for name, tensor in tensors.items()}
    change(metadata, tensors)
    _seal_blocks(tensors)
    ours = {key: value for key, value in metadata.items() if key.startswith("foreroute.")}
    metadata["foreroute.digest"] = seal_file(ours, {k: v for k, v in tensors.items() if k not in BULK})
    path.write_bytes(to_bytes(tensors, metadata=metadata))
    return path


def setting(**tensors):
    """A change that replaces tensors."""

    def change(metadata, there):
        there.update({name: np.asarray(value) for name, value in tensors.items()})

    return change


def _seal_blocks(tensors):
    sizes = tensors["payload_words"].reshape(-1).astype(np.int64)
    seals = seal_slices(tensors["payloads"], np.cumsum(sizes) - sizes, sizes)
    tensors["payload_seals"] = np.frombuffer(seals, np.uint8).reshape(*tensors["payload_words"].shape, 16)
    edges = tensors["block_starts"].tolist()
    valid = np.unpackbits(tensors["valid_bits"], bitorder="little").astype(np.bool_)
    rows = [seal_arrays(tensors["token_ids"][a:b], valid[a:b]) for a, b in pairwise(edges)]
    tensors["row_seals"] = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16)

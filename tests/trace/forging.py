"""Trace files with changed content and right seals, as anybody with this library could make them."""

import numpy as np
from safetensors.numpy import save as to_bytes

from benchmarks.fuzzing.traces import seal_trace
from foreroute.trace.file.writing import encode_trace

STAIRCASE = [0, 2**63 - 1, -(2**63), -1]
"""Each step but one is upwards, and int64 differences of all of them are: they wrap."""


def forged(path, trace, change, *, codec="packed"):
    """Write the file of `trace` after `change(metadata, tensors)`, sealed anew wherever seals can be computed."""
    metadata, tensors = encode_trace(trace, codec)
    tensors = {name: tensor.copy() for name, tensor in tensors.items()}
    change(metadata, tensors)
    seal_trace(tensors, metadata)
    path.write_bytes(to_bytes(tensors, metadata=metadata))
    return path


def setting(**tensors):
    """A change that replaces tensors."""

    def change(metadata, there):
        there.update({name: np.asarray(value) for name, value in tensors.items()})

    return change

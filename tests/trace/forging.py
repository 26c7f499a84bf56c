"""Trace files with changed content and right checksums, as anybody with this library could make them."""

from itertools import pairwise

import numpy as np
import zstandard
from safetensors.numpy import save as to_bytes

from foreroute.trace.file import FORMAT, FRAMES, encode
from tests.robustness.mutations import put_checksum_right

STAIRCASE = [0, 2**63 - 1, -(2**63), -1]
"""Each step but one is upwards, and int64 differences of all of them are: they wrap."""


def forged(path, trace, change, *, encoding="ordered"):
    """Write the file of `trace` after `change(metadata, tensors)`, with a checksum of what the header then has."""
    metadata, tensors = encode(trace, encoding)
    metadata = {"foreroute.trace": "3", **{f"foreroute.{key}": text for key, text in metadata.items()}}
    tensors = {name: tensor.copy() for name, tensor in tensors.items()}
    change(metadata, tensors)
    if "foreroute.checksum" not in metadata:
        put_checksum_right(tensors, metadata, apart=FORMAT.apart)
    path.write_bytes(to_bytes(tensors, metadata=metadata))
    return path


def setting(**tensors):
    """A change that replaces tensors."""

    def change(metadata, there):
        there.update({name: np.asarray(value) for name, value in tensors.items()})

    return change


def holding(frame, edit):
    """A change of what a frame of the first chunk holds: `edit` changes its bytes, or returns others."""

    def change(metadata, tensors):
        contents = frame_contents(tensors)
        content = np.frombuffer(contents[frame], np.uint8).copy()
        edited = edit(content)
        contents[frame] = (content if edited is None else np.asarray(edited, np.uint8)).tobytes()
        set_contents(tensors, contents)

    return change


def frame_contents(tensors):
    """What the frames of a sound file hold, bytes of each, chunk by chunk."""
    ends = np.cumsum(tensors["frame_bytes"].reshape(-1)).tolist()
    frames = tensors[FRAMES].tobytes()
    return [zstandard.ZstdDecompressor().decompress(frames[a:b]) for a, b in pairwise([0, *ends])]


def set_contents(tensors, contents):
    """Put frames that hold something else into the tensors, with right sizes and checksums of their own."""
    compressor, shape = zstandard.ZstdCompressor(write_checksum=True), tensors["frame_bytes"].shape
    frames = [compressor.compress(content) for content in contents]
    tensors["frame_bytes"] = np.array([len(frame) for frame in frames], np.int64).reshape(shape)
    tensors["content_bytes"] = np.array([len(content) for content in contents], np.int64).reshape(shape)
    tensors[FRAMES] = np.frombuffer(b"".join(frames), np.uint8)

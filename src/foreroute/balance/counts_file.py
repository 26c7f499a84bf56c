"""Counts from anywhere: an integer array `counts` [M, L, G, E] in a file of `numpy.savez`."""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from foreroute.errors import CountsError
from foreroute.files import RegularFile

MEMBER = "counts.npy"
MOST_ENTRIES = 2**30
INFLATED_FREELY, INFLATED_PER_BYTE = 16 << 20, 64
"""Counts may take 16 MiB, or 64 times their compressed bytes: of zeros, a deflated stream holds up to 1,032 times its
size."""
MALFORMED = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    RuntimeError,
    NotImplementedError,
    RecursionError,
    MemoryError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile and numpy raise for files that are none of theirs; numpy evaluates a header as a literal of Python."""


def load_counts(path: str | os.PathLike[str]) -> NDArray[np.integer]:
    """Read the array `counts` of an .npz file, which is taken to be hostile: no pickle, no size taken on trust.

    Returns:
        counts_MLGE: integers of the dtype in the file. `check_counts` checks their values.

    Raises:
        CountsError: when the file is missing, no .npz file or damaged, or its array is missing, not of integers, not of
            four axes, larger than `MOST_ENTRIES`, of another size than it states, or compressed to next to nothing.
    """
    source = Path(path)
    try:
        with RegularFile(source, CountsError) as file, file.stream() as stream, zipfile.ZipFile(stream) as archive:
            if MEMBER not in archive.namelist():
                names = ", ".join(name[:40] for name in archive.namelist()[:8]) or "nothing"
                raise CountsError(
                    f"{source} holds {names}; expected an array called counts, as written by "
                    "numpy.savez_compressed(path, counts=counts_MLGE)"
                )
            return _read(source, archive)
    except CountsError:
        raise
    except MALFORMED as error:
        raise CountsError(f"{source} is not a readable .npz file: {error}") from error


def _read(source: Path, archive: zipfile.ZipFile) -> NDArray[Any]:
    stated = archive.getinfo(MEMBER)
    if stated.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CountsError(f"{source}: counts are compressed in a way that numpy does not; write them with numpy.savez")
    with archive.open(MEMBER) as member:
        shape, dtype = _header(source, member)
        header = member.tell()
    size = math.prod(shape) * dtype.itemsize
    if stated.file_size == header + size > max(INFLATED_FREELY, INFLATED_PER_BYTE * stated.compress_size):
        raise CountsError(
            f"{source}: {stated.compress_size} bytes would become counts of {size} bytes; store counts that are nearly "
            "all 0 uncompressed, with numpy.savez"
        )
    if stated.file_size != header + size:
        raise CountsError(
            f"{source}: counts of shape {shape} take {size} bytes, but {stated.file_size - header} are there, "
            f"{stated.compress_size} compressed; the file is damaged"
        )
    with archive.open(MEMBER) as member:
        counts: NDArray[Any] = npy.read_array(member, allow_pickle=False)
        if member.read(1):
            raise CountsError(f"{source}: there are bytes behind the counts; the file is damaged")
    return counts


def _header(source: Path, member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype, once they are known to be those of counts."""
    version = npy.read_magic(member)
    if version != (1, 0):  # later ones have headers of any size
        raise CountsError(f"{source}: counts are in version {version} of the .npy format; expected (1, 0)")
    shape, _, dtype = npy.read_array_header_1_0(member)
    if dtype.kind not in "iu" or len(shape) != 4:
        raise CountsError(f"{source}: counts are {dtype} {list(shape)}; expected integers [M, L, G, E]")
    if min(shape) < 0 or math.prod(shape) > MOST_ENTRIES:
        raise CountsError(f"{source}: counts have the shape {list(shape)}; expected {MOST_ENTRIES} entries at most")
    return shape, dtype

"""The input of a plan: assignments per micro-step, layer, source rank and expert, of traces or from a file.

An *assignment* is one pick of one token: a (token, expert) pair.
"""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import CountsError, InputError
from foreroute.files import RegularFile
from foreroute.layout import Packing
from foreroute.trace.container import RoutingTrace
from foreroute.trace.operations import add_assignments

MOST = 2**31 - 1
"""Most assignments of a cell: planners count in int32."""
FEW_ENTRIES, ENTRIES_PER_ASSIGNMENT = 1 << 26, 16
"""Counts from traces have so many entries at most: any trace 256 MB, and a large one in proportion to what it holds.
Those of a step in which every rank gets thousands of tokens have fewer entries than assignments."""
MOST_EXPERTS = 2**15
"""Plans name experts and ranks in int16."""
MEMBER = "counts.npy"
MOST_ENTRIES = 2**30
"""That a file may hold: 4 GiB as int32. The largest step of the benchmarks has 25 million."""
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


def packed_counts(traces: RoutingTrace | Sequence[RoutingTrace], packing: Packing, *, threads: int = 1) -> NDArray[Any]:
    """Count the assignments of packed sequences, straight from their traces.

    Args:
        traces: one trace or several of one model, S sequences in all.
        packing: the micro-step and the rank of each sequence, in the order of the traces.
        threads: of the counting.

    Returns:
        counts_MLGE: int32 [M, L, G, E].

    Raises:
        CountsError: when there is no trace, more than 2^15 experts, or the packing is of another number of sequences.
        SpecMismatchError: when the traces are of different models.
        TraceContentError: when the packing puts a sequence beyond its own micro-steps or ranks.
    """
    several = [traces] if isinstance(traces, RoutingTrace) else list(traces)
    sizes = [len(trace) for trace in several]
    if not several or sum(sizes) != len(packing.micro_step_S):
        raise CountsError(
            f"got {len(several)} traces with {sum(sizes)} sequences and a packing of {len(packing.micro_step_S)}; "
            "expected one place for each sequence of at least one trace"
        )
    spec = several[0].spec
    for trace in several[1:]:
        spec.require_same(trace.spec, what="a trace to be counted")
    if spec.num_experts > MOST_EXPERTS:
        raise CountsError(f"the traces have {spec.num_experts} experts; expected at most {MOST_EXPERTS}")
    entries = packing.num_micro_steps * spec.num_layers * packing.num_ranks * spec.num_experts
    assignments = sum(int(trace.lengths.sum()) for trace in several) * spec.num_layers * spec.top_k
    if entries > max(FEW_ENTRIES, ENTRIES_PER_ASSIGNMENT * assignments):
        raise CountsError(
            f"counts of {packing.num_micro_steps} micro-steps, {spec.num_layers} layers, {packing.num_ranks} ranks and "
            f"{spec.num_experts} experts would have {entries:,} entries for {assignments:,} assignments; take fewer "
            "ranks, or longer traces"
        )
    counts = np.zeros((packing.num_micro_steps, spec.num_layers, packing.num_ranks, spec.num_experts), np.int32)
    first = 0
    for trace, size in zip(several, sizes, strict=True):
        part = slice(first, first + size)
        add_assignments(trace, packing.micro_step_S[part], packing.rank_S[part], counts, threads=threads)
        first += size
    return counts


def check_counts(counts: ArrayLike, *, num_ranks: int | None = None, top_k: int | None = None) -> NDArray[np.int32]:
    """Check counts that were handed in, once, for all levels of the planner.

    Args:
        counts: integers [M, L, G, E].
        num_ranks: the G that is expected, from a topology.
        top_k: when given, the counts must be those of whole tokens with K distinct experts each: what a rank sends in
            a micro-step is the same in all layers, a multiple of K, and K times its largest entry at least.

    Returns:
        counts_MLGE: int32 [M, L, G, E], C-contiguous and writeable; the array itself where it is that already.

    Raises:
        CountsError: naming what is wrong and where.
    """
    given: NDArray[Any] = np.asarray(counts)
    _check_shape(given, num_ranks)
    if given.dtype.kind not in "iu":
        raise CountsError(
            f"counts are of dtype {given.dtype}; expected integers. Round and convert them where they arise"
        )
    if given.dtype != np.int32 and int(given.max(initial=0)) > MOST:
        raise CountsError(f"counts have an entry of {int(given.max())}; expected at most {MOST}, in a cell together")
    if given.dtype != np.int32 and int(given.min(initial=0)) < 0:
        raise CountsError(f"counts have a negative entry, {int(given.min())}; expected 0 or more")
    counts_MLGE = np.require(given, np.int32, ["C", "A", "W"])  # one kind of array: kernels are compiled once
    total_MLG = _check_entries(counts_MLGE)
    if top_k is not None:
        _check_tokens(counts_MLGE, total_MLG, top_k)
    return counts_MLGE


def _check_shape(given: NDArray[Any], num_ranks: int | None) -> None:
    if given.ndim != 4 or 0 in given.shape:
        raise CountsError(
            f"counts have shape {given.shape}; expected [micro-steps, layers, source ranks, experts], none of them 0"
        )
    ranks, experts = given.shape[2:]
    if num_ranks is not None and ranks != num_ranks:
        raise CountsError(f"counts have {ranks} source ranks and the topology {num_ranks}; expected the same")
    if experts % ranks:
        raise CountsError(
            f"{experts} experts cannot be placed evenly on {ranks} ranks; "
            "use a number of expert-parallel ranks that divides the number of experts"
        )
    if experts > MOST_EXPERTS:
        raise CountsError(f"counts have {experts} experts; expected at most {MOST_EXPERTS}")


def _check_entries(counts_MLGE: NDArray[np.int32]) -> NDArray[np.int64]:
    """int64 [M, L, G], what each rank sends."""
    from foreroute.trace.kernels import scan_counts

    shape = counts_MLGE.shape[:3]
    least, total = np.empty(shape, np.int64), np.empty(shape, np.int64)
    scan_counts(counts_MLGE.reshape(-1, counts_MLGE.shape[3]), least.reshape(-1), total.reshape(-1))
    if least.min() < 0:
        m, layer, g = np.unravel_index(int(least.argmin()), shape)
        raise CountsError(
            f"counts have a negative entry, {least.min()}, in micro-step {m}, layer {layer}, source rank {g}; "
            "expected 0 or more"
        )
    cell_ML = total.sum(axis=2)
    if cell_ML.max() > MOST:
        m, layer = np.unravel_index(int(cell_ML.argmax()), cell_ML.shape)
        raise CountsError(
            f"micro-step {m}, layer {layer} holds {cell_ML.max()} assignments; expected at most {MOST} in a cell"
        )
    return total


def _check_tokens(counts_MLGE: NDArray[np.int32], total_MLG: NDArray[np.int64], top_k: int) -> None:
    if not 1 <= top_k <= counts_MLGE.shape[3]:
        raise CountsError(f"top_k is {top_k}; expected 1 to the {counts_MLGE.shape[3]} experts of the counts")
    uneven = total_MLG != total_MLG[:, :1]
    broken = total_MLG % top_k != 0
    crowded = counts_MLGE.max(axis=3) > total_MLG // top_k
    for wrong, what in (
        (uneven, "expected as many assignments as in layer 0, since the same tokens pass all layers"),
        (broken, f"expected a multiple of top_k = {top_k}"),
        (crowded, f"one expert has more than 1/{top_k} of them, but a token picks an expert once at most"),
    ):
        if wrong.any():
            m, layer, g = np.unravel_index(int(wrong.argmax()), wrong.shape)
            raise CountsError(
                f"in micro-step {m}, layer {layer}, source rank {g} sends {total_MLG[m, layer, g]} assignments; {what}"
            )


def counts_digest(counts_MLGE: NDArray[np.integer]) -> str:
    """XXH3-128, as 32 hexadecimal digits, of the shape and of the values as little-endian int32 in C order.

    Arrays of any integer dtype and layout with the same values have the same digest. It finds damage and mix-ups; it is
    no signature.

    Args:
        counts_MLGE: integers [M, L, G, E], each from 0 to 2**31 - 1.
    """
    from xxhash import xxh3_128

    state = xxh3_128("x".join(map(str, counts_MLGE.shape)).encode())
    for counts_LGE in counts_MLGE:  # in parts, so that another dtype is not copied whole
        state.update(np.ascontiguousarray(counts_LGE, "<i4").data)
    return state.hexdigest()


def tokens_digest(traces: RoutingTrace | Sequence[RoutingTrace]) -> str:
    """XXH3-128, as 32 hexadecimal digits, of the lengths of all sequences as int64 and of their tokens as int32.

    It does not depend on how the sequences are divided into traces.
    """
    from xxhash import xxh3_128

    several = [traces] if isinstance(traces, RoutingTrace) else list(traces)
    state = xxh3_128(np.concatenate([np.zeros(0, "<i8"), *(trace.lengths.astype("<i8") for trace in several)]).data)
    for trace in several:
        state.update(np.ascontiguousarray(trace.token_ids_N, "<i4").data)
    return state.hexdigest()


def contiguous_imbalance(counts_MLE: NDArray[np.int64], num_ranks: int) -> float:
    """Mean over (micro-step, layer) cells of the slowest rank's load over the mean load.

    Each cell is a barrier, so this is the factor by which the experts' time grows when rank g holds the experts
    g * E / G to (g + 1) * E / G - 1 and nothing is balanced.

    Args:
        counts_MLE: assignments per micro-step, layer and expert. Empty cells do not count.
        num_ranks: G; must divide E.

    Returns:
        1.0 when every rank does the same; at most G.
    """
    num_experts = counts_MLE.shape[-1]
    if num_experts % num_ranks:
        raise InputError(f"{num_experts} experts cannot be placed evenly on {num_ranks} ranks; use a divisor")
    loads_CG = counts_MLE.reshape(-1, num_ranks, num_experts // num_ranks).sum(axis=-1)
    loads_CG = loads_CG[loads_CG.sum(axis=1) > 0]
    return float((loads_CG.max(axis=1) / loads_CG.mean(axis=1)).mean()) if len(loads_CG) else 1.0


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
            return _read_counts(source, archive)
    except CountsError:
        raise
    except MALFORMED as error:
        raise CountsError(f"{source} is not a readable .npz file: {error}") from error


def _read_counts(source: Path, archive: zipfile.ZipFile) -> NDArray[Any]:
    stated = archive.getinfo(MEMBER)
    if stated.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CountsError(f"{source}: counts are compressed in a way that numpy does not; write them with numpy.savez")
    with archive.open(MEMBER) as member:
        shape, dtype = _read_header(source, member)
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


def _read_header(source: Path, member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
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

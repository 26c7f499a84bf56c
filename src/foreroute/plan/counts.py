"""The input of a plan: assignments per micro-step, layer, source rank and expert, of traces or from a file.

An *assignment* is one pick of one token: a (token, expert) pair.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import MOST_INT32, as_array
from foreroute.errors import CountsError
from foreroute.files.container import FileFormat, TensorSchema, blake2b_hex
from foreroute.layout import Packing
from foreroute.trace.container import RoutingTrace
from foreroute.trace.operations import add_assignments

MOST_ASSIGNMENTS = MOST_INT32
"""Most assignments of a cell: planners count in int32."""
FEW_ENTRIES, ENTRIES_PER_ASSIGNMENT = 1 << 26, 16
"""Counts from traces have this many entries at most: any trace 256 MB, and a large one in proportion to what it holds.
Those of a step in which every rank gets thousands of tokens have fewer entries than assignments."""
MOST_EXPERTS = 2**15
"""Plans name experts and ranks in int16."""
COUNTS_FILE = FileFormat(
    name="counts",
    version=1,
    error=CountsError,
    metadata=(),
    tensors={"counts_MLGE": TensorSchema("I32", "MLGE")},
    made_by="foreroute.plan.save_counts(counts_MLGE, path) writes counts",
)


def packed_counts(traces: RoutingTrace | Sequence[RoutingTrace], packing: Packing) -> NDArray[Any]:
    """Count the assignments of packed sequences, straight from their traces: int32 [M, L, G, E].

    Args:
        traces: one trace or several of one model, S sequences in all.
        packing: the micro-step and the rank of each sequence, in the order of the traces.

    Raises:
        CountsError: when there is no trace, the packing is of another number of sequences, or the counts would be far
            more than the assignments.
        SpecMismatchError: when the traces are of different models, or of one whose layers differ in experts or picks.
        TraceContentError: when the packing puts a sequence beyond its own micro-steps or ranks.
    """
    several = [traces] if isinstance(traces, RoutingTrace) else list(traces)
    num_sequences = sum(len(trace) for trace in several)
    if not several or num_sequences != len(packing.micro_step_S):
        raise CountsError(
            f"got {len(several)} traces with {num_sequences} sequences and a packing of {len(packing.micro_step_S)}; "
            "expected one place for each sequence of at least one trace"
        )
    spec = several[0].spec
    for trace in several[1:]:
        spec.require_same(trace.spec, what="a trace to be counted")
    # a plan has one E and one K for all layers
    spec.require_alike("a plan")
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
    for trace in several:
        part = slice(first, first + len(trace))
        # into one array, so that traces are never joined
        add_assignments(trace, packing.micro_step_S[part], packing.rank_S[part], counts)
        first += len(trace)
    return counts


def sequence_counts(traces: RoutingTrace | Sequence[RoutingTrace]) -> NDArray[np.int32]:
    """Count the assignments of each sequence, which `pack_sequences` packs by: int32 [S, L, E].

    Raises:
        CountsError, SpecMismatchError: as `packed_counts`.
    """
    size = len(traces) if isinstance(traces, RoutingTrace) else sum(map(len, traces))
    alone = Packing(np.arange(size, dtype=np.int32), np.zeros(size, np.int32), max(size, 1), 1)
    counts: NDArray[np.int32] = packed_counts(traces, alone)[:size, :, 0]
    return counts


def check_counts(
    counts: ArrayLike,  # integers [M, L, G, E]
    *,
    num_ranks: int | None = None,  # the G that is expected, from a topology
    top_k: int | None = None,  # when given, counts must be those of whole tokens with K distinct experts each
) -> NDArray[np.int32]:
    """Return counts that were handed in as int32 [M, L, G, E], checked once for all parts of the planner."""
    given = as_array(counts, name="counts", error=CountsError)
    _check_shape(given, num_ranks)
    if given.dtype.kind not in "iu":
        raise CountsError(
            f"counts are of dtype {given.dtype}; expected integers. Round and convert them where they arise"
        )
    least, most = int(given.min()), int(given.max())
    if least < 0 or most > MOST_ASSIGNMENTS:
        wrong = int(given.argmin() if least < 0 else given.argmax())
        m, layer, g, _ = np.unravel_index(wrong, given.shape)
        raise CountsError(
            f"counts have the entry {given.flat[wrong]} in micro-step {m}, layer {layer}, source rank {g}; expected 0 "
            f"to {MOST_ASSIGNMENTS}"
        )
    counts_MLGE = np.require(given, np.int32, ["C", "A", "W"])  # as compiled loops take it
    if most * counts_MLGE[0, 0].size > MOST_ASSIGNMENTS:  # hardly ever, so that planning does without these sums
        cell_ML = counts_MLGE.sum(axis=(2, 3), dtype=np.int64)
        m, layer = np.unravel_index(int(cell_ML.argmax()), cell_ML.shape)
        if cell_ML[m, layer] > MOST_ASSIGNMENTS:
            raise CountsError(
                f"micro-step {m}, layer {layer} holds {cell_ML[m, layer]} assignments; expected at most "
                f"{MOST_ASSIGNMENTS} in a cell"
            )
    if top_k is not None:
        if not 1 <= top_k <= counts_MLGE.shape[3]:
            raise CountsError(f"top_k is {top_k}; expected 1 to the {counts_MLGE.shape[3]} experts of the counts")
        for odd in odd_tokens(counts_MLGE, top_k):
            raise CountsError(f"{odd}; expected whole tokens, each with {top_k} experts in every layer")
    return counts_MLGE


def _check_shape(given: NDArray[Any], num_ranks: int | None) -> None:
    """Check the axes of counts."""
    if given.ndim != 4 or 0 in given.shape:
        raise CountsError(
            f"counts have shape {given.shape}; expected [micro-steps, layers, source ranks, experts], none of them 0"
        )
    ranks, experts = given.shape[2:]
    if num_ranks is not None and ranks != num_ranks:
        raise CountsError(
            f"counts have {ranks} source ranks and the topology {num_ranks}; set num_ranks of the topology. Counts, "
            f"here {given.shape}, are [micro-steps, layers, source ranks, experts]"
        )
    if experts % ranks:
        raise CountsError(
            f"{experts} experts cannot be placed evenly on {ranks} ranks; use a number of expert-parallel ranks that "
            f"divides it. Counts, here {given.shape}, are [micro-steps, layers, source ranks, experts]"
        )
    if experts > MOST_EXPERTS:
        raise CountsError(f"counts have {experts} experts; expected at most {MOST_EXPERTS}")


def odd_tokens(counts_MLGE: NDArray[np.integer], top_k: int) -> Iterator[str]:
    """Say where counts are not of whole tokens that pick `top_k` different experts in each layer, the same in all."""
    routed_MLG = counts_MLGE.sum(axis=3, dtype=np.int64)
    for is_odd_MLG, why in (
        (routed_MLG != routed_MLG[:, :1], "layer 0 has others, and layers route the same tokens"),
        (routed_MLG % top_k > 0, f"that is no multiple of top_k {top_k}, the assignments of a token"),
        (
            counts_MLGE.max(axis=3) > routed_MLG // top_k,
            f"one expert has more than 1/{top_k} of them, but a token picks an expert once (top_k {top_k})",
        ),
    ):
        if is_odd_MLG.any():
            m, layer, g = np.unravel_index(int(is_odd_MLG.argmax()), is_odd_MLG.shape)
            yield f"layer {layer} has {routed_MLG[m, layer, g]:,} assignments of rank {g} in micro-step {m}: {why}"


def counts_digest(counts_MLGE: NDArray[np.integer]) -> str:
    """Return `blake2b_hex` of the shape, as `MxLxGxE`, of ":" and the bytes of a number, and of a CRC-32 of each
    micro-step.

    That of a micro-step, as a little-endian uint32, is of its values in C order: little-endian unsigned integers of the
    narrowest type of 1, 2 or 4 bytes that holds all values of the step, whatever type they came in.
    """
    narrowest = np.min_scalar_type(int(counts_MLGE.max(initial=0))).newbyteorder("<")
    facts = f"{'x'.join(map(str, counts_MLGE.shape))}:{narrowest.itemsize}".encode()
    # BLAKE2b alone takes about a nanosecond for a byte, a third of the time of planning on 64 ranks
    sums_M = [crc32(np.ascontiguousarray(counts_LGE, narrowest).data) for counts_LGE in counts_MLGE]
    return blake2b_hex(facts, np.array(sums_M, "<u4"))


def tokens_digest(traces: RoutingTrace | Sequence[RoutingTrace]) -> str:
    """Return `blake2b_hex` of the lengths of all sequences as int64 and of their tokens as int32, over all traces."""
    several = [traces] if isinstance(traces, RoutingTrace) else list(traces)
    lengths = [trace.lengths.astype("<i8") for trace in several]
    return blake2b_hex(*lengths, *(np.asarray(trace.token_ids_N, "<i4") for trace in several))


def save_counts(counts_MLGE: ArrayLike, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path | str:
    """Write counts, integers [M, L, G, E], to a path or a URL: the whole file or nothing.

    Raises:
        CountsError: for counts that cannot be; when `path` exists and `overwrite` is False, or cannot be written.
    """
    return COUNTS_FILE.write(path, {}, {"counts_MLGE": check_counts(counts_MLGE)}, overwrite=overwrite)


def load_counts(path: str | os.PathLike[str]) -> NDArray[np.int32]:
    """Read what `save_counts` wrote: int32 [M, L, G, E].

    Raises:
        CountsError: when the file is missing, holds no counts or impossible ones, or is damaged.
    """
    _, tensors = COUNTS_FILE.read(path)
    try:
        return check_counts(tensors["counts_MLGE"])
    except CountsError as error:
        raise CountsError(f"{path}: {error}") from error

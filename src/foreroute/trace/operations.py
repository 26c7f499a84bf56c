"""What is done with whole traces: extended by a later capture, compared, fingerprinted, counted."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import BatchMismatchError, TraceContentError
from foreroute.files import blake2b_hex
from foreroute.trace.checks import as_array, join_ranges
from foreroute.trace.container import RoutingTrace, concatenate
from foreroute.trace.streams import DecisionStream


def extended(earlier: RoutingTrace, later: RoutingTrace, *, replace_routed: bool = False) -> RoutingTrace:
    """Return the sequences of `later`, with the rows that `earlier` had already routed.

    Each sequence of `earlier` must be a beginning of the sequence of the same number in `later`. A row that both routed
    keeps the routes and the weight version of `earlier`, because the log-probabilities of its token came from there.
    So does each stream, where both have a decision.

    Args:
        earlier: S sequences.
        later: S sequences, each at least as long.
        replace_routed: take a row that both routed from `later` instead.

    Raises:
        SpecMismatchError: when the traces come from different models.
        TraceContentError: when one has a stream and the other does not.
        BatchMismatchError: when a sequence of `later` does not begin with the tokens of `earlier`.
    """
    earlier.spec.require_same(later.spec, what="the later capture")
    if len(earlier) != len(later) or (later.lengths < earlier.lengths).any():
        raise BatchMismatchError(
            f"sequences of lengths {earlier.lengths.tolist()[:8]} cannot be extended by sequences of lengths "
            f"{later.lengths.tolist()[:8]}; expected as many, none shorter. Pass the whole sequence so far"
        )
    # the rows of `later` that have a row in `earlier`, in the order of those
    shared = join_ranges(later.offsets[:-1], earlier.lengths)
    differing = np.flatnonzero(later.token_ids_N[shared] != earlier.token_ids_N)
    if differing.size:
        row = int(differing[0])
        sequence = int(np.searchsorted(earlier.offsets, row, side="right") - 1)
        raise BatchMismatchError(
            f"sequence {sequence} has token {int(later.token_ids_N[shared[row]])} at position "
            f"{row - int(earlier.offsets[sequence])}, the earlier capture has {int(earlier.token_ids_N[row])}. "
            "Send token ids, not text, from turn to turn; a rewritten history starts a new trajectory"
        )
    both = concatenate([earlier, later])

    def rows_N(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The row of `both` that each row of the result is, where the two have a decision in these rows."""
        kept = first & ~second[shared] if replace_routed else first
        rows = earlier.num_rows + np.arange(later.num_rows)
        rows[shared[kept]] = np.flatnonzero(kept)
        return rows

    def rows_of(stream: DecisionStream) -> NDArray[np.int64]:
        return rows_N(stream.valid_N[: earlier.num_rows], stream.valid_N[earlier.num_rows :])

    routes = both.without_streams().take_rows(rows_N(earlier.valid_N, later.valid_N), later.lengths)
    return replace(routes, streams={name: stream.take(rows_of(stream)) for name, stream in both.streams.items()})


@dataclass(frozen=True)
class RouteOverlap:
    """Picks that two traces share.

    Attributes:
        shared_RL: unsigned integers [R, L], experts picked by both, for the R rows that both traces routed.
        rows_R: int64 [R], the packed row number of each.
    """

    shared_RL: NDArray[Any]
    rows_R: NDArray[np.int64]


def overlap(a: RoutingTrace, b: RoutingTrace) -> RouteOverlap:
    """Count the experts that `a` and `b` both picked, as sets: pick order does not matter.

    Raises:
        SpecMismatchError: when the traces come from different models.
        BatchMismatchError: when they do not hold the same tokens in the same order.
    """
    a.spec.require_same(b.spec, what="the second trace")
    if not np.array_equal(a.offsets, b.offsets) or not np.array_equal(a.token_ids_N, b.token_ids_N):
        raise BatchMismatchError(
            f"the traces hold different tokens ({a.num_rows} rows in {len(a)} sequences, "
            f"{b.num_rows} in {len(b)}); compare traces of the same sequences in the same order"
        )
    rows = np.flatnonzero(a.valid_N & b.valid_N)
    return RouteOverlap(shared_picks(a.expert_ids_NLK[rows], b.expert_ids_NLK[rows]), rows)


def shared_picks(ids_a: NDArray[Any], ids_b: NDArray[Any]) -> NDArray[Any]:
    """Count the ids of `ids_a` [..., K] that are also in `ids_b` [..., K].

    Returns:
        shared: unsigned integers [...], of the narrowest type that holds K.
    """
    # One pick after the other: K comparisons of [..., K] take less memory than one of [..., K, K].
    shared = np.zeros(ids_a.shape[:-1], np.min_scalar_type(ids_a.shape[-1]))
    for k in range(ids_a.shape[-1]):
        shared += (ids_b == ids_a[..., k : k + 1]).any(axis=-1)
    return shared


def digest(trace: RoutingTrace) -> str:
    """Return BLAKE2b-128 over model facts, sequence bounds, tokens, weight versions, validity, routes, streams, as hex.

    Provenance and the model's name do not take part: the same routes have the same digest wherever they came from.
    Whether pick order is kept does: a trace read from a file of sets has the digest of `trace.without_pick_order()`,
    not that of the trace that was recorded.
    """
    spec, streams = trace.spec, sorted(trace.streams.items())
    layers = [[layer.index, layer.kind.value] for layer in spec.layers]
    beside = [[name, stream.kind, stream.facts()] for name, stream in streams]
    facts = json.dumps([spec.num_experts, spec.top_k, layers, trace.pick_order_kept, beside])
    arrays: list[NDArray[Any]] = [
        trace.offsets,
        trace.token_ids_N,
        trace.weight_versions_N,
        trace.valid_N,
        trace.expert_ids_NLK,
    ]
    arrays += [array for _, stream in streams for array in stream.arrays().values()]
    return blake2b_hex(facts.encode(), *(np.asarray(array, array.dtype.newbyteorder("<")) for array in arrays))


def count_assignments(trace: RoutingTrace, micro_step_S: ArrayLike) -> NDArray[np.int64]:
    """Count the assignments per micro-step, layer and expert.

    Args:
        trace: the routes of S sequences; absent rows do not count.
        micro_step_S: integers [S], the micro-step that each sequence belongs to, from 0.

    Returns:
        counts_MLE: int64 [M, L, E]. Its sum is K times L times the number of routed rows.
    """
    micro_steps = _numbers(micro_step_S, len(trace), "micro-step")
    counts = np.zeros((_upto(micro_steps), trace.spec.num_layers, 1, trace.spec.num_experts), np.int32)
    add_assignments(trace, micro_steps, np.zeros(len(trace), np.int64), counts)
    return counts[:, :, 0].astype(np.int64)


def add_assignments(
    trace: RoutingTrace,
    micro_step_S: ArrayLike,
    rank_S: ArrayLike,
    counts_MLGE: NDArray[np.int32],
    *,
    threads: int = 1,
) -> None:
    """Add a trace's assignments to counts per micro-step, layer, source rank and expert, reading each id once.

    Args:
        trace: the routes of S sequences; absent rows do not count.
        micro_step_S: integers [S], the micro-step that executes each sequence, from 0.
        rank_S: integers [S], the rank that each sequence is on, from 0.
        counts_MLGE: int32 [M, L, G, E], C-contiguous, added to.
        threads: work on that many parts of the counts at a time.

    Raises:
        TraceContentError: when a micro-step or a rank is not a whole number within the counts, or the counts are of
            another model.
    """
    from foreroute.trace.kernels import add_counts

    spec = trace.spec
    shape = counts_MLGE.shape
    if len(shape) != 4 or (shape[1], shape[3]) != (spec.num_layers, spec.num_experts):
        raise TraceContentError(
            f"got counts of shape {shape} for {spec.num_layers} layers of {spec.num_experts} experts; "
            "expected [micro-steps, layers, ranks, experts]"
        )
    if counts_MLGE.dtype != np.int32 or not counts_MLGE.flags.c_contiguous:
        raise TraceContentError(f"got counts of dtype {counts_MLGE.dtype}; expected a C-contiguous int32 array")
    micro_steps = _numbers(micro_step_S, len(trace), "micro-step", shape[0])
    ranks = _numbers(rank_S, len(trace), "rank", shape[2])
    start_S = (micro_steps * shape[1] * shape[2] + ranks) * shape[3]
    # by where they add, so that each set of counts is filled once and stays in the cache meanwhile
    order = np.argsort(start_S, kind="stable")

    def count(part: NDArray[np.int64]) -> None:
        held_LE = np.zeros((shape[1], shape[3]), np.uint32)
        stride, flat = shape[2] * shape[3], counts_MLGE.reshape(-1)
        add_counts(trace.expert_ids_NLK.reshape(-1), trace.valid_N, trace.offsets, part, start_S, stride, held_LE, flat)

    parts = _parts(order, start_S, trace.lengths, threads)
    if len(parts) == 1:
        count(parts[0])
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(count, parts))


def _parts(
    order: NDArray[np.int64], start_S: NDArray[np.int64], rows_S: NDArray[np.int64], threads: int
) -> list[NDArray[np.int64]]:
    """Cut the order into about even parts, none of which writes where another does."""
    # Sequences of one start add to the same counts, so that only between starts the work may be cut.
    firsts = np.flatnonzero(np.diff(start_S[order])) + 1
    if threads < 2 or not len(firsts):
        return [order]
    done = np.cumsum(rows_S[order])[firsts - 1]
    cuts = firsts[np.searchsorted(done, done[-1] * np.arange(1, threads) / threads)]
    return np.split(order, np.unique(cuts))


def _numbers(values: ArrayLike, count: int, noun: str, limit: int | None = None) -> NDArray[np.int64]:
    """One integer from 0 for each sequence, below `limit` where there is one."""
    numbers = as_array(values, name=f"{noun}s")
    if numbers.shape != (count,) or (numbers.size and numbers.dtype.kind not in "iu"):
        raise TraceContentError(
            f"got {noun}s of dtype {numbers.dtype} and shape {numbers.shape} for {count} sequences; "
            "expected one integer from 0 each"
        )
    if numbers.size and numbers.min() < 0:
        raise TraceContentError(f"{noun} {int(numbers.min())} is below 0; leave out sequences by trace.select")
    if limit is not None and _upto(numbers) > limit:
        raise TraceContentError(
            f"{noun} {int(numbers.max())} is not below {limit}, the number of {noun}s of the counts"
        )
    return numbers.astype(np.int64)


def _upto(numbers: NDArray[Any]) -> int:
    return int(numbers.max()) + 1 if numbers.size else 0

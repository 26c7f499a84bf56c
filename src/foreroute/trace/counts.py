"""How many assignments each expert received, and from which rank they came."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.checks import as_array
from foreroute.trace.container import RoutingTrace


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

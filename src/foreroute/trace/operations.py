"""Operations on whole traces: extending one by a later capture, comparing two, counting assignments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import as_numbers
from foreroute.errors import BatchMismatchError, TraceContentError
from foreroute.trace.checks import join_ranges, place_of
from foreroute.trace.container import RoutingTrace, concatenate, on_common_layers
from foreroute.trace.spec import RoutedLayer, RoutingSpec


def extended(earlier: RoutingTrace, later: RoutingTrace) -> RoutingTrace:
    """Return the sequences of `later`, with the rows that `earlier`, their beginnings, had already routed.

    A row that both routed keeps the routes and the weight version of `earlier`, because the log-probability of the
    token behind it came from there. The last row of `earlier` comes from `later`, as the token behind it did. So does
    each stream, where both have a decision.

    Raises:
        SpecMismatchError: when the traces come from different models.
        TraceContentError: when one has a stream and the other does not.
        BatchMismatchError: when a sequence of `later` does not begin with the tokens of `earlier`.
    """
    earlier, later = on_common_layers([earlier, later], what="the later capture")
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
        sequence, position = place_of(row, earlier.offsets)
        raise BatchMismatchError(
            f"sequence {sequence} has token {int(later.token_ids_N[shared[row]])} at position {position}, the earlier "
            f"capture has {int(earlier.token_ids_N[row])}. "
            "Send token ids, not text, from turn to turn; a rewritten history starts a new trajectory"
        )
    both = concatenate([earlier, later])

    is_last_N = np.zeros(earlier.num_rows, np.bool_)
    is_last_N[earlier.offsets[1:][earlier.lengths > 0] - 1] = True

    def rows_N(decided_N: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Choose the row of `both` for each row of the result, by which of its rows have a decision."""
        earlier_has, later_has = np.split(decided_N, [earlier.num_rows])
        kept_N = earlier_has & ~(is_last_N & later_has[shared])
        rows = earlier.num_rows + np.arange(later.num_rows)
        rows[shared[kept_N]] = np.flatnonzero(kept_N)
        return rows

    routes = both.without_streams().take_rows(rows_N(both.valid_N), later.lengths)
    streams = {name: each.take(rows_N(each.valid_N)) for name, each in both.streams.items()}
    return replace(routes, streams=streams)


def with_lookups(
    trace: RoutingTrace, spec: RoutingSpec, lookups: Mapping[RoutedLayer, Callable[[NDArray[np.int32]], NDArray[Any]]]
) -> RoutingTrace:
    """Return the trace with the model's layers that it lacks and that look experts up by token, as `lookups` do."""
    lacking = [layer for layer in spec.layers if layer not in trace.spec.layers and layer in lookups]
    if not lacking or spec.sizes:
        spec.require_same(trace.spec, what="the trace")
        return trace
    rest = spec.select([layer for layer in spec.layers if layer not in lacking])
    rest.require_same(trace.spec, what="the trace")
    ids_NLK = np.zeros((trace.num_rows, spec.num_layers, spec.top_k), spec.id_dtype)
    ids_NLK[:, spec.positions(rest.layers)] = trace.expert_ids_NLK
    for layer in lacking:
        ids_NLK[trace.valid_N, spec.layers.index(layer)] = lookups[layer](trace.token_ids_N[trace.valid_N])
    return replace(trace, spec=spec, expert_ids_NLK=ids_NLK)


def overlap(a: RoutingTrace, b: RoutingTrace) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Count experts that both picked, as sets: unsigned integers [R, L], and int64 [R], the rows that both routed."""
    a.spec.require_same(b.spec, what="the second trace")
    if not np.array_equal(a.offsets, b.offsets) or not np.array_equal(a.token_ids_N, b.token_ids_N):
        raise BatchMismatchError(
            f"the traces hold different tokens ({a.num_rows} rows in {len(a)} sequences, "
            f"{b.num_rows} in {len(b)}); compare traces of the same sequences in the same order"
        )
    rows = np.flatnonzero(a.valid_N & b.valid_N)
    shared_RL = shared_picks(a.expert_ids_NLK[rows], b.expert_ids_NLK[rows])
    if a.spec.sizes:  # both have the same fillers, each of which is among those of the other
        shared_RL -= (a.spec.top_k - a.spec.picks_L).astype(shared_RL.dtype)
    return shared_RL, rows


def shared_picks(ids_a: NDArray[Any], ids_b: NDArray[Any]) -> NDArray[Any]:
    """Count the ids of `ids_a` [..., K] that are also in `ids_b` [..., K]: unsigned integers [...]."""
    # One pick after the other: K comparisons of [..., K] take less memory than one of [..., K, K].
    shared = np.zeros(ids_a.shape[:-1], np.min_scalar_type(ids_a.shape[-1]))
    for k in range(ids_a.shape[-1]):
        shared += (ids_b == ids_a[..., k : k + 1]).any(axis=-1)
    return shared


def count_assignments(
    trace: RoutingTrace,  # the routes of S sequences; absent rows do not count
    micro_step_S: ArrayLike,  # integers [S], the micro-step that each sequence belongs to, from 0
) -> NDArray[np.int64]:
    """Count the assignments per micro-step, layer and expert: int64 [M, L, E]."""
    micro_steps = as_numbers(micro_step_S, name="micro-steps", below=1 << 31, count=len(trace))
    counts = np.zeros((micro_steps.max(initial=-1) + 1, trace.spec.num_layers, 1, trace.spec.num_experts), np.int32)
    add_assignments(trace, micro_steps, np.zeros(len(trace), np.int64), counts)
    return counts[:, :, 0].astype(np.int64)


def add_assignments(
    trace: RoutingTrace,  # the routes of S sequences; absent rows do not count
    micro_step_S: ArrayLike,  # integers [S], the micro-step that executes each sequence, from 0
    rank_S: ArrayLike,  # integers [S], the rank that each sequence is on, from 0
    counts_MLGE: NDArray[np.int32],  # [M, L, G, E], C-contiguous, added to
) -> None:
    """Add a trace's assignments to counts per micro-step, layer, source rank and expert, reading each id once."""
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
    micro_steps = as_numbers(micro_step_S, name="micro-steps", below=shape[0], count=len(trace))
    ranks = as_numbers(rank_S, name="ranks", below=shape[2], count=len(trace))
    start_S = (micro_steps * shape[1] * shape[2] + ranks) * shape[3]
    # by where they add, so that each set of counts is filled once and stays in the cache meanwhile
    order = np.argsort(start_S, kind="stable")
    stride, flat = shape[2] * shape[3], counts_MLGE.reshape(-1)
    for _, top_k, at in spec.groups:
        ids = np.ascontiguousarray(trace.expert_ids_NLK[:, at, :top_k])
        layers = np.arange(spec.num_layers)[at]
        held_LE = np.zeros((len(layers), shape[3]), np.uint32)
        add_counts(ids.reshape(-1), trace.valid_N, trace.offsets, order, start_S, layers * stride, held_LE, flat)

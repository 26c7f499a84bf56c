"""Operations on whole traces: extending one by later captures, comparing two, counting assignments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import as_numbers
from foreroute.errors import BatchMismatchError, TraceContentError
from foreroute.kernels import BOOL, INT, ArrayOf, compiled
from foreroute.trace.checks import check_rows
from foreroute.trace.container import RoutingTrace, concatenate, on_common_layers
from foreroute.trace.spec import ID_TYPES, RoutedLayer, RoutingSpec
from foreroute.trace.streams import streams_of_all

_ROWS, _NUMBERS, _COUNTS = ArrayOf(np.bool_, 1), ArrayOf(np.int64, 1), ArrayOf(np.int32, 1, filled=True)
_add_counts = {
    dtype: compiled(f"add_counts_{dtype}", ArrayOf(dtype, 3), _ROWS, *[_NUMBERS] * 4, INT, _COUNTS, returns=BOOL)
    for dtype in ID_TYPES
}


def extended(earlier: RoutingTrace, *later: RoutingTrace) -> RoutingTrace:
    """Return the sequences of the last capture, with the rows that those before it, their beginnings, had routed.

    A row that several routed keeps the routes and the weight version of the first, because the log-probability of the
    token behind it came from there. The last row of a capture comes from the next one, as the token behind it did. So
    does each stream, where several have a decision. Join many turns in one call: it copies each row once, and a call
    for each turn copies all rows so far.

    Raises:
        SpecMismatchError: when the traces come from different models.
        TraceContentError: when one has a stream and another does not.
        BatchMismatchError: when a sequence does not begin with the tokens of the capture before.
    """
    parts = on_common_layers([earlier, *later], what="the later capture")
    for before, after in pairwise(parts):
        _check_begins(before, after)
    streams = {}
    for name in dict.fromkeys(name for part in parts for name in part.streams):
        whole = streams_of_all(name, [part.streams.get(name) for part in parts], [part.valid_N for part in parts])
        first, *others = (
            whole[number].take(np.arange(start, stop))
            for number, start, stop in _chosen_rows(parts, [each.valid_N for each in whole])
        )
        streams[name] = first.join(others)
    none = np.zeros(0, np.int64)
    facts = concatenate([replace(part, streams={}).take_rows(none, none) for part in parts])
    if not facts.pick_order_kept:
        parts = [part.without_pick_order() for part in parts]
    chosen = [
        (parts[n], slice(start, stop)) for n, start, stop in _chosen_rows(parts, [each.valid_N for each in parts])
    ]
    return replace(
        facts,
        expert_ids_NLK=np.concatenate([part.expert_ids_NLK[rows] for part, rows in chosen]),
        valid_N=np.concatenate([part.valid_N[rows] for part, rows in chosen]),
        token_ids_N=parts[-1].token_ids_N,
        weight_versions_N=np.concatenate([part.weight_versions_N[rows] for part, rows in chosen]),
        offsets=parts[-1].offsets,
        streams=streams,
    )


def _check_begins(before: RoutingTrace, after: RoutingTrace) -> None:
    """Raise `BatchMismatchError` unless each sequence of a capture begins with the tokens of the one before it."""
    if len(before) != len(after) or (after.lengths < before.lengths).any():
        raise BatchMismatchError(
            f"sequences of lengths {before.lengths.tolist()[:8]} cannot be extended by sequences of lengths "
            f"{after.lengths.tolist()[:8]}; expected as many, none shorter. Pass the whole sequence so far"
        )
    for sequence in range(len(before)):
        had_T = before.tokens(sequence)
        differs_T = after.tokens(sequence)[: len(had_T)] != had_T
        if differs_T.any():
            position = int(differs_T.argmax())
            raise BatchMismatchError(
                f"sequence {sequence} has token {int(after.tokens(sequence)[position])} at position {position}, the "
                f"earlier capture has {int(had_T[position])}. "
                "Send token ids, not text, from turn to turn; a rewritten history starts a new trajectory"
            )


def _chosen_rows(parts: list[RoutingTrace], decided: list[NDArray[np.bool_]]) -> list[tuple[int, int, int]]:
    """Choose the rows that `extended` keeps, by those with a decision: part, first row there and the one behind."""
    last = parts[-1]
    part_N, row_N = np.full(last.num_rows, len(parts) - 1), np.arange(last.num_rows)
    is_decided_N = np.zeros(last.num_rows, np.bool_)
    ends_S = np.full(len(last), -1)  # the last row of each sequence in the part before
    for number, (part, decided_n) in enumerate(zip(parts, decided, strict=True)):
        rows = np.flatnonzero(decided_n)
        of_row = np.searchsorted(part.offsets, rows, side="right") - 1
        at = rows + (last.offsets[:-1] - part.offsets[:-1])[of_row]
        kept = ~is_decided_N[at] | (at == ends_S[of_row])
        part_N[at[kept]], row_N[at[kept]] = number, rows[kept]
        is_decided_N[at] = True
        lengths = part.lengths
        ends_S = np.where(lengths > 0, last.offsets[:-1] + lengths - 1, -1)
    cut_N = np.ones(last.num_rows + 1, np.bool_)  # rows that follow each other in one part are taken together
    cut_N[1:-1] = (np.diff(part_N) != 0) | (np.diff(row_N) != 1)
    edges = np.flatnonzero(cut_N)
    firsts, counts = edges[:-1], np.diff(edges)
    columns = (part_N[firsts], row_N[firsts], row_N[firsts] + counts)
    return [*zip(*(each.tolist() for each in columns), strict=True)] or [(len(parts) - 1, 0, 0)]


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


def same_sets(ids_a: NDArray[Any], ids_b: NDArray[Any]) -> NDArray[np.bool_]:
    """Say whether picks [..., K] are the same in any order: bool [...]."""
    return np.asarray((np.sort(ids_a, -1) == np.sort(ids_b, -1)).all(axis=-1))


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
    valid_N, offsets = np.ascontiguousarray(trace.valid_N), np.ascontiguousarray(trace.offsets)
    for _, top_k, at in spec.layers_by_size:
        ids = np.ascontiguousarray(trace.expert_ids_NLK[:, at, :top_k])
        layers = np.arange(spec.num_layers)[at]
        if not _add_counts[ids.dtype](ids, valid_N, offsets, order, start_S, layers * stride, shape[3], flat):
            check_rows(trace.expert_ids_NLK, trace.valid_N, trace.offsets, spec)  # names the row

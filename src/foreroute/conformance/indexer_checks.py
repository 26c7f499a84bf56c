"""Indexers of sparse attention: queries attend to what the trace says, and choices of other rows are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.conformance.adapter import Case, Seen, Unsupported
from foreroute.conformance.check import PLACEMENT, CheckContext, CheckFailed, Checks, refused, require
from foreroute.conformance.gate_checks import TOLERANCE, furthest
from foreroute.trace import INDEXER, IndexerSpec, RoutingTrace

CHECKS = Checks()


@CHECKS.add(
    "indexers-followed",
    "Queries attend to what the trace says, and so they do when activations are recomputed",
    needs=PLACEMENT,
)
def _followed(context: CheckContext) -> None:
    """Look at what queries attend to in a forward, and at gradients where a recomputation chose for itself."""
    trace = _with_canaries(context, _indexers(context))
    _require_attended(context, trace)
    gradients = []
    for checkpointing in (False, True):
        model, handle = context.pair(Case(checkpointing=checkpointing))
        with handle.replay(trace):
            step = model.forward(context.base)
        step.backward()
        gradients.append(model.gradients())
    name, off = furthest(*gradients)
    require(
        off <= TOLERANCE,
        f"with activations recomputed after the session, the gradient of {name} is off by {off:.2g} of its size: the "
        "recomputation chose for itself",
    )


def _require_attended(context: CheckContext, trace: RoutingTrace) -> None:
    """Raise `CheckFailed` unless queries attend to the choices of the trace."""
    spec, seen = _indexers(context), context.replayed(trace)
    wanted_NDU, chosen_NDU = _visible(trace, spec), _chosen(seen)
    wrong_ND = (wanted_NDU != chosen_NDU).any(axis=2)
    if not wrong_ND.any():
        return
    # what was dropped has a name of its own: queries attend as in the untouched model
    require((_chosen(context.native) != chosen_NDU).any(), "the choices were dropped, and nothing was raised")
    row, layer = np.argwhere(wrong_ND)[0]
    raise CheckFailed(
        f"{int(wrong_ND.sum())} of {wrong_ND.size} choices were not followed; first: row {row}, {spec.layers[layer]}, "
        f"units {np.flatnonzero(wanted_NDU[row, layer]).tolist()} were asked for, and the query attends to "
        f"{np.flatnonzero(chosen_NDU[row, layer]).tolist()}"
    )


@CHECKS.add("indexers-recorded", "Recorded choices are those that queries attended to", needs=("indexers-followed",))
def _recorded(context: CheckContext) -> None:
    """Hold recorded choices against what the attention was given, not against what an indexer returned."""
    spec = _indexers(context)
    handle: Any
    for what, replays in (("the model's own choices", False), ("replayed choices", True)):
        model, handle = context.pair()
        with handle.record(indexers=True) as recording:
            if replays:
                with handle.replay(_with_canaries(context, spec)):
                    seen = model.forward(context.base, grad=False).seen
            else:
                seen = model.forward(context.base, grad=False).seen
        recorded = recording.trace()
        require(INDEXER in recorded.streams, f"{what} are not in what was recorded")
        same = (_visible(recorded, spec) == _chosen(seen)).all()
        require(same, f"{what} were recorded otherwise than queries attended")


@CHECKS.add(
    "indexers-refused",
    "Choices of other rows or layers, of units that a query does not see, or missing ones, are refused",
    needs=("indexers-followed",),
)
def _refused(context: CheckContext) -> None:
    """Replay choices that an adapter would follow silently if it read them by their place alone."""
    spec = _indexers(context)
    trace = _with_canaries(context, spec)
    good = trace.streams[INDEXER]
    # sequences of the base batch are of one length
    rows = np.arange(trace.num_rows).reshape(len(trace), -1)
    beyond = good.ids.copy()
    beyond[np.cumsum(good.counts_ND)[good.counts_ND.reshape(-1) > 0] - 1] = context.base.width * spec.heads
    elsewhere = tuple(replace(layer, index=layer.index + 1) for layer in good.layers)
    for what, stream in (
        ("choices shifted by a row", good.take(np.roll(rows, 1, axis=1).reshape(-1))),
        ("units behind the query", replace(good, ids=beyond)),
        ("choices of other layers", replace(good, layers=elsewhere)),
        ("a row without choices, which later tokens depend on,", good.without(rows[0, -2:-1])),
    ):
        replayed = partial(context.replayed, trace.with_stream(INDEXER, stream))
        require(refused(replayed) is not None, f"{what} went through without an error")


def _indexers(context: CheckContext) -> IndexerSpec:
    """The facts of the family's indexers. Raises `Unsupported` where the adapter replays none."""
    spec = context.adapter.indexers()
    if spec is None:
        raise Unsupported("the adapter replays no indexers (indexers)")
    return spec


def _chosen(seen: Seen) -> NDArray[np.bool_]:
    """Bool [N, D, U · H], what the probe saw. Raises `Unsupported` where it does not look."""
    if seen.chosen_NDU is None:
        raise Unsupported("the probe does not see what indexers hand on")
    return seen.chosen_NDU


def _with_canaries(context: CheckContext, spec: IndexerSpec) -> RoutingTrace:
    """The model's own routes, with choices at random: each row and layer has its own, and so says where it belongs."""
    rng = np.random.default_rng([context.seed, 2])
    trace = context.native_trace()
    positions = trace.positions_N
    # a set may hold no unit behind its query: such sets are refused
    visible_N = spec.num_visible(positions)

    def sets(pick: Callable[[int], NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        parts = [pick(int(visible)) for visible in visible_N]
        counts = np.array([len(part) for part in parts], np.int64)
        return counts, np.concatenate(parts).astype(np.int32)

    def at_random(visible: int) -> NDArray[np.int64]:
        units_HK = rng.permuted(np.tile(np.arange(visible), (spec.heads, 1)), axis=1)[:, : spec.top_k]
        return np.sort((units_HK * spec.heads + np.arange(spec.heads)[:, None]).reshape(-1))

    return trace.with_stream(INDEXER, spec.stream(positions, [sets(at_random) for _ in spec.layers]))


def _visible(trace: RoutingTrace, spec: IndexerSpec) -> NDArray[np.bool_]:
    """Bool [N, D, U · H], what a trace says that queries attend to."""
    stream = trace.streams[INDEXER]
    seen_N = spec.num_visible(trace.positions_N) * spec.heads
    width = int(spec.num_visible(trace.lengths - 1).max()) * spec.heads
    whole_NDU = np.broadcast_to((np.arange(width) < seen_N[:, None])[:, None], (len(seen_N), stream.depth, width))
    chosen_NDU = np.zeros(whole_NDU.shape, np.bool_)
    of_set = np.repeat(np.arange(len(seen_N) * stream.depth), np.diff(stream.offsets))
    chosen_NDU.reshape(-1, width)[of_set, stream.ids] = True
    # an empty set means all that the query sees
    return np.where((stream.counts_ND == 0)[..., None], whole_NDU, chosen_NDU)

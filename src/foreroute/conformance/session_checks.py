"""Sessions: what is recomputed, what else they touch, and what they record.

A recomputed layer sees the routes of its own forward. A session touches its own model, while it is open, and nothing
else. What is recorded is what was executed: once per row, in order, in the width of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.conformance.adapter import AttachedModel, Batch, Case, Fault, ModelUnderTest, Unsupported
from foreroute.conformance.check import PLACEMENT, CheckContext, Checks, refused, require, require_followed
from foreroute.conformance.route_checks import WIDE
from foreroute.trace import RoutingTrace
from foreroute.trace.operations import same_sets

RECOMPUTE = Case(checkpointing=True)
CHECKS = Checks()
Gradients = Mapping[str, NDArray[Any]]


@CHECKS.add(
    "recompute-order", "Several micro-batches in flight keep their own routes in recomputation", needs=PLACEMENT
)
def _order(context: CheckContext) -> None:
    """Run backwards in the order of forwards, and in the reverse one."""
    # a queue per layer is right in one of them at most
    for order in ("ABab", "ABba"):
        model, handle = context.pair(RECOMPUTE)
        one, two = _batches(context)
        with handle.replay(_routes(context, handle, one)):
            first = model.forward(one)
        with handle.replay(_routes(context, handle, two)):
            second = model.forward(two)
            for step in (first, second) if order == "ABab" else (second, first):
                step.backward()
        what = f"forward A, forward B, backward {order[2].upper()}, backward {order[3].upper()}"
        _require_same(context, _one_by_one(context, one, two), model.gradients(), what)


@CHECKS.add(
    "backward-outside-session",
    "A backward after the session recomputes under the routes of its forward",
    needs=PLACEMENT,
)
def _outside(context: CheckContext) -> None:
    """Close the session before backward."""
    # as trainers do, whose backward is not where their forward is
    model, handle = context.pair(RECOMPUTE)
    batch, _ = _batches(context)
    with handle.replay(_routes(context, handle, batch)):
        step = model.forward(batch)
    step.backward()
    _require_same(context, _one_by_one(context, batch), model.gradients(), "backward after the session has closed")


@CHECKS.add(
    "forward-only-residue", "A forward-only pass leaves nothing that a later backward consumes", needs=PLACEMENT
)
def _residue(context: CheckContext) -> None:
    """Run a pass without gradients, as for old log-probs, before an update on another batch."""
    # rows that it leaves behind would be consumed by the next recomputation
    model, handle = context.pair(RECOMPUTE)
    one, two = _batches(context)
    with handle.replay(_routes(context, handle, one)):
        model.forward(one, grad=False)
    with handle.replay(_routes(context, handle, two)):
        model.forward(two).backward()
    _require_same(context, _one_by_one(context, two), model.gradients(), "a forward-only pass before the update")


@CHECKS.add(
    "selective-checkpoint",
    "Checkpoints that keep some results recompute under the routes of their forward",
    needs=(*PLACEMENT, "dense-scores"),
)
def _selective(context: CheckContext) -> None:
    """Keep the results of top-k and of products."""
    # such a checkpoint answers the n-th call of an operator in the recomputation by the n-th of the forward
    _in_case(context, replace(RECOMPUTE, selective=True), "selective checkpoints")


@CHECKS.add("compiled-layers", "Compiled layers take other routes in every session", needs=PLACEMENT)
def _compiled(context: CheckContext) -> None:
    """Compile every layer."""
    # the compiler traces a router with the session around it, and might keep its routes as constants
    _in_case(context, Case(compiled=True), "compiled layers")


def _in_case(context: CheckContext, case: Case, what: str) -> None:
    model, handle = context.pair(case)
    batches = _batches(context)
    for batch in batches:
        with handle.replay(_routes(context, handle, batch)):
            model.forward(batch).backward()
    _require_same(context, _one_by_one(context, *batches), model.gradients(), what)


def _one_by_one(context: CheckContext, *batches: Batch) -> Gradients:
    """Each batch forward and backward in its own session, without recomputation."""
    model, handle = context.pair()
    for batch in batches:
        with handle.replay(_routes(context, handle, batch)):
            model.forward(batch).backward()
    return model.gradients()


def _batches(context: CheckContext) -> tuple[Batch, Batch]:
    """Two of the same shape, so that the rows of one fit the other."""
    return context.batch(8, 8, seed=5), context.batch(8, 8, seed=6)


def _routes(context: CheckContext, handle: AttachedModel, batch: Batch) -> RoutingTrace:
    """Foreign routes of a batch, the same each time."""
    return context.foreign(handle.spec, batch, seed=int(batch.sequences[0].sum()))


def _require_same(context: CheckContext, expected: Gradients, seen: Gradients, what: str) -> None:
    """Raise `CheckFailed` unless gradients are equal within what the adapter's author allows."""
    tolerance = context.adapter.gradient_tolerance
    for name, value in expected.items():
        other = seen.get(name)
        require(other is not None, f"{what}: {name} has no gradient")
        off = float(np.abs(other - value).max()) if other is not None else 0.0
        limit = tolerance * float(np.abs(value).max())
        require(
            off <= limit,
            f"{what}: the gradient of {name} is off by {off:.3g}, so a recomputed layer took other routes than its "
            "forward did",
        )


class _InterruptionError(Exception):
    pass


@CHECKS.add("reference-untouched", "Reference, teacher and critic models never notice a replay")
def _reference(context: CheckContext) -> None:
    """Run models without the adapter, built before the session and during it."""
    # a patched class or a registry shows in either
    before = context.untouched()
    model, handle = context.pair()
    with handle.replay(context.foreign(handle.spec, context.base)):
        model.forward(context.base, grad=False)
        within = context.untouched()
        for reference, when in ((before, "before"), (within, "during")):
            message = refused(partial(_require_native, reference, context, "a reference model"))
            require(message is None, f"a reference model built {when} the session was refused its forward: {message}")


@CHECKS.add("model-restored", "After a session the model routes itself again", quick=True)
def _restored(context: CheckContext) -> None:
    """Compare a forward after the session with the untouched model."""
    # by bits: only a hook that changes nothing may stay behind
    model, handle = context.pair()
    with handle.replay(context.foreign(handle.spec, context.base)):
        model.forward(context.base, grad=False)
    message = refused(lambda: _require_native(model, context, "after the session"))
    require(message is None, f"after the session, a forward without replay is refused: {message}")


@CHECKS.add(
    "second-model", "Attaching another model disturbs none that is attached", needs=(*PLACEMENT, "model-restored")
)
def _second_attached(context: CheckContext) -> None:
    """Replay routes in each of two models, while both sessions are open, and run both when these have closed."""
    model, handle = context.pair()
    wanted = context.foreign(handle.spec, context.base)
    with handle.replay(wanted):
        other, other_handle = context.pair()
        others = context.foreign(other_handle.spec, context.base, seed=8)
        with other_handle.replay(others):
            for each, routes, which in ((other, others, "second"), (model, wanted, "first")):
                seen = each.forward(context.base, grad=False).seen
                require_followed(routes, seen, context.native, f"the model that was attached {which}")
    _require_native(other, context, "the model that was attached second, after both sessions")
    _require_native(model, context, "the model that was attached first, after both sessions")


@CHECKS.add("exception-safety", "A session that ends with an exception leaves nothing behind", quick=True)
def _exceptions(context: CheckContext) -> None:
    """Raise in the body of the session, and inside a layer, where a hook may be half done."""
    model, handle = context.pair()
    trace = context.foreign(handle.spec, context.base)
    try:
        with handle.replay(trace):
            model.forward(context.base, grad=False)
            raise _InterruptionError
    except _InterruptionError:
        pass
    message = refused(lambda: _require_native(model, context, "after a session that ended with an exception"))
    require(message is None, f"after a session that ended with an exception, a plain forward is refused: {message}")
    try:
        model.inject(Fault.FORWARD_RAISES)
    except Unsupported:
        return
    try:
        with handle.replay(trace):
            model.forward(context.base, grad=False)
    except Exception:  # the injected error, or what the adapter made of it
        _require_native(model, context, "after an exception in the middle of a forward")
        return
    require(False, "an exception in the middle of a forward was swallowed")


def _require_native(model: ModelUnderTest, context: CheckContext, what: str) -> None:
    """Raise `CheckFailed` unless a forward is that of the untouched model, bit for bit."""
    seen = model.forward(context.base, grad=False).seen
    require(
        np.array_equal(seen.logprobs_R, context.native.logprobs_R),
        f"{what}: the forward is not the untouched model's; log-probs are off by up to "
        f"{np.abs(seen.logprobs_R - context.native.logprobs_R).max():.3g}",
    )


@CHECKS.add("recording-faithful", "A recording holds what was executed, token by token", quick=True)
def _faithful(context: CheckContext) -> None:
    """Hold tokens, lengths, weight version and ids of a recording against what the probe saw."""
    model, handle = context.pair()
    with handle.record(weight_version=5) as recording:
        seen = model.forward(context.base, grad=False).seen
    trace = recording.trace()
    require(
        np.array_equal(trace.lengths, context.base.lengths)
        and np.array_equal(trace.token_ids_N, np.concatenate(context.base.sequences)),
        f"sequences of lengths {context.base.lengths.tolist()} were recorded with lengths {trace.lengths.tolist()}"
        " or other tokens",
    )
    require(trace.versions == (5,), f"rows of weight version 5 were stamped {trace.versions}")
    routed = trace.valid_N
    recorded, executed = trace.expert_ids_NLK[routed], seen.ids_NLK[routed]
    if context.adapter.picks_in_order:
        wrong = (recorded != executed).any(axis=(1, 2))
    else:
        wrong = ~same_sets(recorded, executed).all(axis=1)
    require(not wrong.any(), f"{int(wrong.sum())} of {len(wrong)} recorded rows are not what the experts were given")


@CHECKS.add("recorded-once", "Recomputation records no row a second time")
def _once(context: CheckContext) -> None:
    """Record a forward and a backward that recomputes it."""
    # the router runs again, and its rows are there already
    model, handle = context.pair(Case(checkpointing=True))
    batch = context.base
    with handle.record() as recording:
        model.forward(batch).backward()
    rows = recording.trace().num_rows
    expected = int(batch.lengths.sum())
    require(rows == expected, f"{expected} tokens were recorded as {rows} rows once backward had recomputed them")


@CHECKS.add("int-width", "The width of ids follows the model, never the ids at hand")
def _width(context: CheckContext) -> None:
    """Record small ids, and look at the type that they are kept in."""
    # a later part of the same rollout may hold larger ids
    for case, expected in ((Case(), context.spec.id_dtype), (Case(num_experts=WIDE), np.dtype(np.uint16))):
        model, handle = context.pair(case)
        low = context.foreign(handle.spec, context.base).expert_ids_NLK % min(handle.spec.num_experts, 256)
        ids = np.argsort(np.argsort(low, axis=-1), axis=-1)  # small distinct ids
        trace = context.trace_of(np.split(ids, len(context.base.sequences)), context.base, handle.spec)
        with handle.replay(trace), handle.record() as recording:
            model.forward(context.base, grad=False)
        recorded = recording.trace()
        require(
            recorded.expert_ids_NLK.dtype == expected,
            f"a model of {handle.spec.num_experts} experts was recorded as {recorded.expert_ids_NLK.dtype} because the "
            f"ids at hand are small; expected {expected}",
        )

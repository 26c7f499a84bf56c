"""Checks that foreroute refuses what cannot be replayed rightly, before or in the first forward.

So are models that are not what they seem, unless replay finds the routers that run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from foreroute.conformance.adapter import Batch, Fault, Seen
from foreroute.conformance.check import (
    FOREIGN_VERSION,
    PLACEMENT,
    CheckContext,
    CheckFailed,
    Checks,
    refused,
    require,
    require_followed,
    unless_refused,
)
from foreroute.trace import RoutedLayer, RoutingTrace
from foreroute.trace.operations import same_sets

CHECKS = Checks()


@CHECKS.add("fused-bypass", "A router that a fused path bypasses is refused, not skipped", needs=PLACEMENT)
def _fused(context: CheckContext) -> None:
    """Bypass a router before and after attaching."""
    # what is found once may have changed since
    for attached_first in (False, True):
        _followed_or_refused(context, Fault.FUSED_ROUTER, attached_first=attached_first)


@CHECKS.add("orphan-routers", "Routers that never run take no layer's routes", needs=PLACEMENT)
def _orphans(context: CheckContext) -> None:
    """Register a copy of the layers, of which neither names nor counts tell that it does not run."""
    _followed_or_refused(context, Fault.ORPHAN_ROUTERS, attached_first=False)


def _followed_or_refused(context: CheckContext, fault: Fault, *, attached_first: bool) -> None:
    """A model with a trap: its routes are followed all the same, or it is refused."""
    model = context.untouched()
    wanted = context.foreign(context.spec, context.base)
    if not attached_first:
        model.inject(fault)

    def run() -> Seen:
        handle = context.adapter.attach(model)
        if attached_first:
            model.inject(fault)
        with handle.replay(wanted):
            return model.forward(context.base, grad=False).seen

    if (seen := unless_refused(run)) is not None:
        when = ", which came about after attaching" if attached_first else ""
        require_followed(wanted, seen, context.native, f"{fault.value}{when}")


# under other gates the head is given other hidden states, and routes them otherwise
@CHECKS.add(
    "mtp-alias", "A multi-token-prediction head takes no decoder layer's routes", needs=(*PLACEMENT, "gate-rule")
)
def _mtp(context: CheckContext) -> None:
    """Add a head whose layer number restarts at 0: it keeps its own routes, or the model is refused."""
    untouched = context.untouched()
    untouched.inject(Fault.MTP_HEAD)
    native = untouched.forward(context.base, grad=False).seen
    require(bool(native.other_ids), "the probe reports no router beside the decoder's (Seen.other_ids)")
    # every row has a route, so that what an adapter does without one is left to missing-rows
    trace = context.trace_of(np.split(context.native.ids_NLK, len(context.base.sequences)), context.base)
    model = context.untouched()
    model.inject(Fault.MTP_HEAD)

    def run() -> Seen:
        with context.adapter.attach(model).replay(trace):
            return model.forward(context.base, grad=False).seen

    if (seen := unless_refused(run)) is not None:
        require(same_sets(native.ids_NLK, seen.ids_NLK).all(), "the head took routes from the decoder's layers")
        for name, ids in native.other_ids.items():
            wrong = int((~same_sets(ids, seen.other_ids[name])).sum())
            require(
                wrong == 0, f"{wrong} of {np.prod(ids.shape[:-1])} rows of {name} were given a decoder layer's routes"
            )


@CHECKS.add("duplicates-refused", "An expert picked twice in a row is refused", quick=True)
def _duplicates(context: CheckContext) -> None:
    """Hand in a row with one expert K times."""

    # all-to-all dispatchers count each pick, so sizes of rows and of splits would differ
    def repeat(ids: Any) -> Any:
        ids[2, 0, :] = ids[2, 0, 0]
        return ids

    if context.spec.top_k > 1:
        _bad_ids(context, repeat, "an expert twice in a row")


@CHECKS.add("range-refused", "An id beyond the experts is refused", quick=True)
def _out_of_range(context: CheckContext) -> None:
    """Hand in the id behind the last expert, as the first redundant slot of a load balancer has."""

    def exceed(ids: Any) -> Any:
        ids[2, 0, 0] = context.spec.num_experts
        return ids

    _bad_ids(context, exceed, "an expert that does not exist")


def _bad_ids(context: CheckContext, spoil: Callable[[Any], Any], what: str) -> None:
    """Hand in routes that no router makes, by the adapter's own entrance, and run a forward under them."""
    model, handle = context.pair()
    good = context.foreign(handle.spec, context.base).expert_ids_NLK.astype(np.int64)
    routes = np.split(spoil(good), len(context.base.sequences))

    def run() -> Any:
        with handle.replay(context.adapter.ingest(handle.spec, context.base.sequences, routes)):
            return model.forward(context.base, grad=False).seen.ids_NLK[2, 0].tolist()

    if (executed := unless_refused(run)) is not None:
        raise CheckFailed(f"{what} was not refused, and the experts were given {executed}")


@CHECKS.add("stale-refused", "Routes of other weights than expected are refused", quick=True)
def _stale(context: CheckContext) -> None:
    """Replay a trace where its version is the expected one, and where it is not."""

    def run(trace: RoutingTrace) -> None:
        model, handle = context.pair()
        with handle.replay(trace, weight_version=FOREIGN_VERSION):
            model.forward(context.base, grad=False)

    trace = context.foreign(context.spec, context.base)
    # the control: an adapter that refuses every version would pass otherwise
    message = refused(lambda: run(trace))
    require(message is None, f"a trace of the expected weight version was refused: {message}")
    require(
        refused(lambda: run(trace.with_weight_version(FOREIGN_VERSION - 1))) is not None,
        f"a trace of weight version {FOREIGN_VERSION - 1} was replayed where version {FOREIGN_VERSION} was expected",
    )


@CHECKS.add("other-model-refused", "The trace of another model is refused", quick=True)
def _other_model(context: CheckContext) -> None:
    """Replay traces of other models, with ids that this one could have been given."""
    spec = context.spec
    moved = tuple(RoutedLayer(layer.index + 1, layer.kind) for layer in spec.layers)
    more = (*spec.layers, RoutedLayer(spec.layers[-1].index + 1))
    others = {
        "other layers": replace(spec, layers=moved),
        "one layer more": replace(spec, layers=more),
        "one expert more": replace(spec, num_experts=spec.num_experts + 1),
        "one pick more": replace(spec, top_k=min(spec.top_k + 1, spec.num_experts)),
    }
    for what, other in others.items():
        _must_refuse(context, context.foreign(other, context.base), f"the trace of a model with {what}")


@CHECKS.add("other-tokens-refused", "Routes are bound to tokens: those of another batch are refused", quick=True)
def _other_tokens(context: CheckContext) -> None:
    """Replay traces of other tokens, with as many rows as these need."""
    base, spec = context.base, context.spec
    order = [1, 0, *range(2, len(base.sequences))]
    swapped = Batch(tuple(base.sequences[s] for s in order))
    shorter = Batch(tuple(tokens[:-2] for tokens in base.sequences))
    others = {
        "other tokens": context.batch(*base.lengths, seed=3),
        "the same sequences in another order": swapped,
        "shorter sequences": shorter,
        "fewer sequences": Batch(base.sequences[:-1]),
    }
    for what, batch in others.items():
        _must_refuse(context, context.foreign(spec, batch), f"a trace of {what}")


def _must_refuse(context: CheckContext, trace: RoutingTrace, what: str) -> None:
    """Raise `CheckFailed` when a trace is replayed without an error, in the session or in its forward."""
    require(refused(lambda: context.replayed(trace)) is not None, f"{what} was replayed without an error")


@CHECKS.add("empty-session-refused", "A session in which nothing was replayed is an error", quick=True)
def _empty(context: CheckContext) -> None:
    """Open a session and run no forward: what was never replayed must not look as if it had been."""
    _, handle = context.pair()

    def run() -> None:
        with handle.replay(context.foreign(handle.spec, context.base)):
            pass

    require(refused(run) is not None, "a session in which no forward ran ended without an error")

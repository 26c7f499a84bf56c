"""What cannot be replayed rightly is refused with an error of foreroute's, before or in the first forward.

So are models that are not what they seem, unless replay finds the routers that run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from foreroute.conformance.adapter import Batch, Fault, Seen
from foreroute.conformance.check import FOREIGN_VERSION, Check, Situation, misplaced, refused, require, same_sets
from foreroute.trace import RoutedLayer, RoutingTrace


def _fused(situation: Situation) -> None:
    for attached_first in (False, True):
        situation.require_placement()
        _followed_or_refused(situation, Fault.FUSED_ROUTER, attached_first=attached_first)


def _orphans(situation: Situation) -> None:
    situation.require_placement()
    _followed_or_refused(situation, Fault.ORPHAN_ROUTERS, attached_first=False)


def _followed_or_refused(situation: Situation, fault: Fault, *, attached_first: bool) -> None:
    model = situation.untouched()
    seen: list[Seen] = []
    wanted = situation.foreign(situation.spec, situation.base)
    if not attached_first:
        model.plant(fault)

    def run() -> None:
        handle = situation.adapter.attach(model)
        if attached_first:
            model.plant(fault)
        with handle.replay(wanted):
            seen.append(model.forward(situation.base, grad=False).seen)

    if refused(run) is None:
        found = misplaced(wanted, seen[0].ids_NLK, situation.native.ids_NLK)
        when = ", which came about after attaching" if attached_first else ""
        require(found is None, f"{fault.value}{when}: {found.sentence}" if found else "")


def _mtp(situation: Situation) -> None:
    """A trace of the decoder's routes: the head keeps its own, or the model is refused."""
    situation.require_placement()
    untouched = situation.untouched()
    untouched.plant(Fault.MTP_HEAD)
    native = untouched.forward(situation.base, grad=False).seen
    require(bool(native.other_ids), "the probe reports no router beside the decoder's (Seen.other_ids)")
    # every row has a route, so that what an adapter does without one is left to missing-rows
    trace = situation.trace_of(np.split(situation.native.ids_NLK, len(situation.base.sequences)), situation.base)
    model = situation.untouched()
    model.plant(Fault.MTP_HEAD)
    seen: list[Seen] = []

    def run() -> None:
        with situation.adapter.attach(model).replay(trace):
            seen.append(model.forward(situation.base, grad=False).seen)

    if refused(run) is None:
        require(same_sets(native.ids_NLK, seen[0].ids_NLK).all(), "the head took routes from the decoder's layers")
        for name, ids in native.other_ids.items():
            wrong = int((~same_sets(ids, seen[0].other_ids[name])).sum())
            require(
                wrong == 0, f"{wrong} of {np.prod(ids.shape[:-1])} rows of {name} were given a decoder layer's routes"
            )


def _duplicates(situation: Situation) -> None:
    def repeat(ids: Any) -> Any:
        ids[2, 0, :] = ids[2, 0, 0]
        return ids

    if situation.spec.top_k > 1:
        _bad_ids(situation, repeat, "an expert twice in a row")


def _out_of_range(situation: Situation) -> None:
    def exceed(ids: Any) -> Any:
        ids[2, 0, 0] = situation.spec.num_experts
        return ids

    _bad_ids(situation, exceed, "an expert that does not exist")


def _bad_ids(situation: Situation, spoil: Callable[[Any], Any], what: str) -> None:
    model, handle = situation.pair()
    good = situation.foreign(handle.spec, situation.base).expert_ids_NLK.astype(np.int64)
    routes = np.split(spoil(good), len(situation.base.sequences))
    executed = []

    def run() -> None:
        with handle.replay(situation.adapter.ingest(handle.spec, situation.base.sequences, routes)):
            executed.append(model.forward(situation.base, grad=False).seen.ids_NLK[2, 0])

    require(
        refused(run) is not None,
        f"{what} was not refused, and the experts were given {executed[0].tolist() if executed else []}",
    )


def _stale(situation: Situation) -> None:
    def run(trace: RoutingTrace) -> None:
        model, handle = situation.pair()
        with handle.replay(trace, weight_version=FOREIGN_VERSION):
            model.forward(situation.base, grad=False)

    trace = situation.foreign(situation.spec, situation.base)
    message = refused(lambda: run(trace))
    require(message is None, f"a trace of the expected weight version was refused: {message}")
    require(
        refused(lambda: run(trace.with_weight_version(FOREIGN_VERSION - 1))) is not None,
        f"a trace of weight version {FOREIGN_VERSION - 1} was replayed where version {FOREIGN_VERSION} was expected",
    )


def _other_model(situation: Situation) -> None:
    spec = situation.spec
    moved = tuple(RoutedLayer(layer.index + 1, layer.kind) for layer in spec.layers)
    more = (*spec.layers, RoutedLayer(spec.layers[-1].index + 1))
    others = {
        "other layers": replace(spec, layers=moved),
        "one layer more": replace(spec, layers=more),
        "one expert more": replace(spec, num_experts=spec.num_experts + 1),
        "one pick more": replace(spec, top_k=min(spec.top_k + 1, spec.num_experts)),
    }
    for what, other in others.items():
        _must_refuse(situation, situation.foreign(other, situation.base), f"the trace of a model with {what}")


def _other_tokens(situation: Situation) -> None:
    base, spec = situation.base, situation.spec
    order = [1, 0, *range(2, len(base.sequences))]
    swapped = Batch(tuple(base.sequences[s] for s in order))
    shorter = Batch(tuple(tokens[:-2] for tokens in base.sequences))
    others = {
        "other tokens": situation.batch(*base.lengths, seed=3),
        "the same sequences in another order": swapped,
        "shorter sequences": shorter,
        "fewer sequences": Batch(base.sequences[:-1]),
    }
    for what, batch in others.items():
        _must_refuse(situation, situation.foreign(spec, batch), f"a trace of {what}")


def _must_refuse(situation: Situation, trace: RoutingTrace, what: str) -> None:
    model, handle = situation.pair()

    def run() -> None:
        with handle.replay(trace):
            model.forward(situation.base, grad=False)

    require(refused(run) is not None, f"{what} was replayed without an error")


def _empty(situation: Situation) -> None:
    _, handle = situation.pair()

    def run() -> None:
        with handle.replay(situation.foreign(handle.spec, situation.base)):
            pass

    require(refused(run) is not None, "a session in which no forward ran ended without an error")


CHECKS = (
    Check(
        "fused-bypass",
        "A router that a fused path bypasses is refused, not skipped",
        "Bypasses one router, before and after attaching, and replays.",
        _fused,
    ),
    Check(
        "orphan-routers",
        "Routers that never run take no layer's routes",
        "Registers a second copy of the decoder before the one that runs, and replays.",
        _orphans,
    ),
    Check(
        "mtp-alias",
        "A multi-token-prediction head takes no decoder layer's routes",
        "Adds a head whose layer number restarts at 0, and replays the decoder's own routes.",
        _mtp,
    ),
    Check(
        "duplicates-refused",
        "An expert picked twice in a row is refused",
        "Hands in a row of one expert K times, through the adapter's entrance.",
        _duplicates,
        quick=True,
    ),
    Check(
        "range-refused",
        "An id beyond the experts is refused",
        "Hands in id E, as a physical slot of a load balancer would be.",
        _out_of_range,
        quick=True,
    ),
    Check(
        "stale-refused",
        "Routes of other weights than expected are refused",
        "Replays a trace of one version while expecting another.",
        _stale,
        quick=True,
    ),
    Check(
        "other-model-refused",
        "The trace of another model is refused",
        "Replays traces with other layers, one layer, one expert and one pick more.",
        _other_model,
        quick=True,
    ),
    Check(
        "other-tokens-refused",
        "Routes are bound to tokens: those of another batch are refused",
        "Replays traces of other tokens, of sequences in another order, shorter or fewer.",
        _other_tokens,
        quick=True,
    ),
    Check(
        "empty-session-refused",
        "A session in which nothing was replayed is an error",
        "Opens a session and runs no forward.",
        _empty,
        quick=True,
    ),
)

"""Models that are not what they seem: replay finds the routers that run, or refuses."""

from __future__ import annotations

import numpy as np

from foreroute.conformance.adapter import Plant, Seen
from foreroute.conformance.check import Check
from foreroute.conformance.misplaced import misplaced
from foreroute.conformance.situation import Situation, refused, require, same_sets


def _fused(situation: Situation) -> None:
    for attached_first in (False, True):
        situation.require_placement()
        _followed_or_refused(situation, Plant.FUSED_ROUTER, attached_first=attached_first)


def _orphans(situation: Situation) -> None:
    situation.require_placement()
    _followed_or_refused(situation, Plant.ORPHAN_ROUTERS, attached_first=False)


def _followed_or_refused(situation: Situation, plant: Plant, *, attached_first: bool) -> None:
    model = situation.untouched()
    seen: list[Seen] = []
    wanted = situation.foreign(situation.spec, situation.base)
    if not attached_first:
        model.plant(plant)

    def run() -> None:
        handle = situation.adapter.attach(model)
        if attached_first:
            model.plant(plant)
        with handle.replay(wanted):
            seen.append(model.forward(situation.base, grad=False).seen)

    if refused(run) is None:
        found = misplaced(wanted, seen[0].ids_NLK, situation.native.ids_NLK)
        when = ", which came about after attaching" if attached_first else ""
        require(found is None, f"{plant.value}{when}: {found.sentence}" if found else "")


def _mtp(situation: Situation) -> None:
    """A trace of the decoder's routes: the head keeps its own, or the model is refused."""
    situation.require_placement()
    untouched = situation.untouched()
    untouched.plant(Plant.MTP_HEAD)
    native = untouched.forward(situation.base, grad=False).seen
    require(bool(native.other_ids), "the probe reports no router beside the decoder's (Seen.other_ids)")
    # every row has a route, so that what an adapter does without one is left to missing-rows
    trace = situation.trace_of(np.split(situation.native.ids_NLK, len(situation.base.sequences)), situation.base)
    model = situation.untouched()
    model.plant(Plant.MTP_HEAD)
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
)

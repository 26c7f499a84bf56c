"""Do replayed routes reach the tokens and layers that they belong to?"""

from __future__ import annotations

from functools import partial

import numpy as np

from foreroute.conformance.adapter import Case
from foreroute.conformance.check import Check
from foreroute.conformance.misplaced import misplaced
from foreroute.conformance.situation import Broken, Situation, require
from foreroute.trace import RoutingTrace, extended

WIDE = 264
"""More experts than one byte tells apart, and a multiple of the usual group counts."""


def _placed(check: str, situation: Situation) -> None:
    found = situation.placement
    if found is not None and found.check == check:
        raise Broken(found.sentence)


def _one_pick(situation: Situation) -> None:
    _follows(situation, Case(top_k=1))


def _wide(situation: Situation) -> None:
    _follows(situation, Case(num_experts=WIDE), low=WIDE - 8)
    _follows(situation, Case(num_experts=WIDE), low=120)


def _follows(situation: Situation, case: Case, *, low: int = 0) -> None:
    """Foreign routes on another shape of model; with one pick, expert 0 is among them many times."""
    situation.require_placement()
    model, handle = situation.pair(case)
    wanted = situation.foreign(handle.spec, situation.base, low=low)
    native = situation.untouched(case).forward(situation.base, grad=False).seen
    with handle.replay(wanted):
        seen = model.forward(situation.base, grad=False).seen
    found = misplaced(wanted, seen.ids_NLK, native.ids_NLK)
    require(found is None, found.sentence if found else "")


def _resumed(situation: Situation) -> None:
    """A rollout that was interrupted and went on under new weights keeps the rows of both."""
    situation.require_placement()
    model, handle = situation.pair()
    whole = situation.foreign(handle.spec, situation.base).with_weight_version(4)
    first = situation.foreign(handle.spec, situation.base, seed=2).truncated(np.full(len(whole), 7))
    joined = extended(first.with_weight_version(3), whole)
    with handle.replay(joined):
        seen = model.forward(situation.base, grad=False).seen
    _require_followed(joined, seen.ids_NLK, situation)


def _require_followed(wanted: RoutingTrace, seen: np.ndarray, situation: Situation) -> None:
    found = misplaced(wanted, seen, situation.native.ids_NLK)
    require(found is None, f"with rows of weight versions {wanted.versions}: {found.sentence}" if found else "")


CHECKS = (
    Check(
        "routes-followed",
        "Every token is computed by the experts of the trace",
        "Replays random routes, with and without a row for the last token, and compares what the experts were given; "
        "a difference that has a name of its own is left to the check of that name.",
        partial(_placed, "routes-followed"),
        quick=True,
    ),
    Check(
        "silent-no-op",
        "A replay that has no effect is never silent",
        "Fails when all layers, or some whole layers, kept their own routes while replaying and nothing was raised.",
        partial(_placed, "silent-no-op"),
        quick=True,
    ),
    Check(
        "token-shift",
        "Row p is the routing of input position p, with T or T - 1 rows",
        "Looks for the one shift by tokens that explains the difference.",
        partial(_placed, "token-shift"),
        quick=True,
    ),
    Check(
        "sequence-order",
        "Rows of a batch are read in the order in which they were written",
        "Looks for a batch-first/sequence-first mix-up, or sequences in another order, that explains the difference.",
        partial(_placed, "sequence-order"),
        quick=True,
    ),
    Check(
        "layer-axis",
        "The layer axis is read by its table: dense layers have no row",
        "Looks for an offset of layers that explains the difference.",
        partial(_placed, "layer-axis"),
        quick=True,
    ),
    Check(
        "one-pick",
        "With K = 1, a row of expert 0 is a route like any other",
        "Replays random routes on a model with one pick per token.",
        _one_pick,
    ),
    Check(
        "wide-ids",
        "Expert ids above 127 and above 255 survive",
        f"Replays ids 120 and up, and the last eight, on a model of {WIDE} experts.",
        _wide,
    ),
    Check(
        "resumed-rollout",
        "A resumed rollout keeps the rows of both weight versions, once each",
        "Replays sequences whose first 7 rows are of version 3 and the rest of version 4.",
        _resumed,
    ),
)

"""Activation recomputation: every recomputed layer sees the routes of its own forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.conformance.adapter import AttachedModel, Batch, Case
from foreroute.conformance.check import Check
from foreroute.conformance.situation import Situation, require
from foreroute.trace import RoutingTrace

RECOMPUTE = Case(checkpointing=True)
Gradients = Mapping[str, NDArray[Any]]


def _order(situation: Situation) -> None:
    situation.require_placement()
    for order in ("ABab", "ABba"):
        model, handle = situation.pair(RECOMPUTE)
        one, two = _batches(situation)
        with handle.replay(_routes(situation, handle, one)):
            first = model.forward(one)
        with handle.replay(_routes(situation, handle, two)):
            second = model.forward(two)
            for step in (first, second) if order == "ABab" else (second, first):
                step.backward()
        what = f"forward A, forward B, backward {order[2].upper()}, backward {order[3].upper()}"
        _require_same(situation, _one_by_one(situation, one, two), model.gradients(), what)


def _outside(situation: Situation) -> None:
    situation.require_placement()
    model, handle = situation.pair(RECOMPUTE)
    batch, _ = _batches(situation)
    with handle.replay(_routes(situation, handle, batch)):
        step = model.forward(batch)
    step.backward()
    _require_same(situation, _one_by_one(situation, batch), model.gradients(), "backward after the session has closed")


def _residue(situation: Situation) -> None:
    situation.require_placement()
    model, handle = situation.pair(RECOMPUTE)
    one, two = _batches(situation)
    with handle.replay(_routes(situation, handle, one)):
        model.forward(one, grad=False)
    with handle.replay(_routes(situation, handle, two)):
        model.forward(two).backward()
    _require_same(situation, _one_by_one(situation, two), model.gradients(), "a forward-only pass before the update")


def _one_by_one(situation: Situation, *batches: Batch) -> Gradients:
    """Each batch forward and backward in its own session, without recomputation."""
    model, handle = situation.pair()
    for batch in batches:
        with handle.replay(_routes(situation, handle, batch)):
            model.forward(batch).backward()
    return model.gradients()


def _batches(situation: Situation) -> tuple[Batch, Batch]:
    return situation.batch(8, 8, seed=5), situation.batch(8, 8, seed=6)


def _routes(situation: Situation, handle: AttachedModel, batch: Batch) -> RoutingTrace:
    return situation.foreign(handle.spec, batch, seed=int(batch.sequences[0].sum()))


def _require_same(situation: Situation, expected: Gradients, seen: Gradients, what: str) -> None:
    tolerance = situation.adapter.gradient_tolerance
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


CHECKS = (
    Check(
        "recompute-order",
        "Several micro-batches in flight keep their own routes in recomputation",
        "Runs forward A, forward B, then both backwards in either order, and compares with one at a time and no "
        "recomputation.",
        _order,
    ),
    Check(
        "backward-outside-session",
        "A backward after the session recomputes under the routes of its forward",
        "Closes the replay session before backward.",
        _outside,
    ),
    Check(
        "forward-only-residue",
        "A forward-only pass leaves nothing that a later backward consumes",
        "Runs a pass without gradients, as for old log-probs, then an update on another batch.",
        _residue,
    ),
)

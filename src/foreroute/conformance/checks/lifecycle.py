"""A session touches its own model, while it is open, and nothing else."""

from __future__ import annotations

from functools import partial

import numpy as np

from foreroute.conformance.adapter import ModelUnderTest, Plant, Unsupported
from foreroute.conformance.check import Check
from foreroute.conformance.misplaced import misplaced
from foreroute.conformance.situation import Situation, refused, require
from foreroute.trace import RoutingTrace


class _InterruptionError(Exception):
    pass


def _reference(situation: Situation) -> None:
    before = situation.untouched()
    model, handle = situation.pair()
    with handle.replay(situation.foreign(handle.spec, situation.base)):
        model.forward(situation.base, grad=False)
        within = situation.untouched()
        for reference, when in ((before, "before"), (within, "during")):
            message = refused(partial(_require_native, reference, situation, "a reference model"))
            require(message is None, f"a reference model built {when} the session was refused its forward: {message}")


def _second_attached(situation: Situation) -> None:
    situation.require_placement()
    model, handle = situation.pair()
    wanted = situation.foreign(handle.spec, situation.base)
    with handle.replay(wanted):
        other, other_handle = situation.pair()
        theirs = situation.foreign(other_handle.spec, situation.base, seed=8)
        with other_handle.replay(theirs):
            _require_followed(other, theirs, situation, "the model that was attached second")
            _require_followed(model, wanted, situation, "the model that was attached first")


def _restored(situation: Situation) -> None:
    model, handle = situation.pair()
    with handle.replay(situation.foreign(handle.spec, situation.base)):
        model.forward(situation.base, grad=False)
    message = refused(lambda: _require_native(model, situation, "after the session"))
    require(message is None, f"after the session, a forward without replay is refused: {message}")


def _exceptions(situation: Situation) -> None:
    model, handle = situation.pair()
    trace = situation.foreign(handle.spec, situation.base)
    try:
        with handle.replay(trace):
            model.forward(situation.base, grad=False)
            raise _InterruptionError
    except _InterruptionError:
        pass
    message = refused(lambda: _require_native(model, situation, "after a session that ended with an exception"))
    require(message is None, f"after a session that ended with an exception, a plain forward is refused: {message}")
    try:
        model.plant(Plant.BURST)
    except Unsupported:
        return
    try:
        with handle.replay(trace):
            model.forward(situation.base, grad=False)
    except Exception:
        _require_native(model, situation, "after an exception in the middle of a forward")
        return
    require(False, "an exception in the middle of a forward was swallowed")


def _require_native(model: ModelUnderTest, situation: Situation, what: str) -> None:
    seen = model.forward(situation.base, grad=False).seen
    require(
        np.array_equal(seen.logprobs_R, situation.native.logprobs_R),
        f"{what}: the forward is not the untouched model's; log-probs are off by up to "
        f"{np.abs(seen.logprobs_R - situation.native.logprobs_R).max():.3g}",
    )


def _require_followed(model: ModelUnderTest, wanted: RoutingTrace, situation: Situation, what: str) -> None:
    seen = model.forward(situation.base, grad=False).seen
    found = misplaced(wanted, seen.ids_NLK, situation.native.ids_NLK)
    require(found is None, f"{what}: {found.sentence}" if found else "")


CHECKS = (
    Check(
        "reference-untouched",
        "Reference, teacher and critic models never notice a replay",
        "Runs untouched models, built before and during a session, while it is open.",
        _reference,
    ),
    Check(
        "second-model",
        "Attaching another model disturbs none that is attached",
        "Attaches a second model during a session and replays other routes in each.",
        _second_attached,
    ),
    Check(
        "model-restored",
        "After a session the model routes itself again",
        "Compares a forward after a session with the untouched model.",
        _restored,
        quick=True,
    ),
    Check(
        "exception-safety",
        "A session that ends with an exception leaves nothing behind",
        "Raises in the body of a session, and in the middle of a forward, and compares a plain forward afterwards.",
        _exceptions,
        quick=True,
    ),
)

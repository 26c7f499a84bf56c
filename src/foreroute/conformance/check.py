"""Checks, their outcomes, and what they stand on.

A `CheckContext` holds what several need: batches, routes, the behaviour of the untouched model, and where replayed
routes ended up. `misplaced` names the mistake when they did not reach their experts. What a check needs is data: one
whose needs failed says nothing, so that one mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.conformance.adapter import AdapterUnderTest, AttachedModel, Batch, Case, ModelUnderTest, Padding, Seen
from foreroute.errors import ForerouteError
from foreroute.mismatch import Defect, explain
from foreroute.trace import RoutingSpec, RoutingTrace
from foreroute.trace.checks import place_of
from foreroute.trace.operations import same_sets

FOREIGN_VERSION = 3
"""Weight version of the routes that the kit makes: not 0, which a field that was never set would have."""
PLACEMENT = ("routes-followed", "silent-no-op", "token-shift", "sequence-order", "layer-axis")
"""Ids of the checks that routes reach their experts in the simplest of cases, which most others need."""
_NAMES = ("the trace", "what the experts were given")
_CHECK_OF = {
    Defect.SHIFT: "token-shift",
    Defect.FLATTENING: "sequence-order",
    Defect.PERMUTATION: "sequence-order",
    Defect.LAYER_OFFSET: "layer-axis",
    Defect.LAYER_ORDER: "layer-axis",
}


class CheckFailed(Exception):  # noqa: N818
    """Raised by a check whose requirement is not met; the message says what was seen."""


class Outcome(StrEnum):
    """Outcome of a check. `BLOCKED` is no pass: another check failed and this one could say nothing."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Check:
    """One property of an adapter.

    Attributes:
        id: short name; known bugs refer to it.
        title: the property, as a sentence that is true of a right adapter.
        run: raises `CheckFailed` when the property does not hold.
        needs: ids of checks without which this one says nothing: it is blocked when one of them failed.
        quick: takes only forwards of one model of the family's own shape, so it can run on a user's model.
    """

    id: str
    title: str
    run: Callable[[CheckContext], None]
    needs: tuple[str, ...] = ()
    quick: bool = False


class Checks(list[Check]):
    """The checks of one file, in their order."""

    def add(
        self, name: str, title: str, *, needs: tuple[str, ...] = (), quick: bool = False
    ) -> Callable[[Callable[[CheckContext], None]], Callable[[CheckContext], None]]:
        """Make a check of the function that is decorated: its id, and attributes of `Check`."""

        def append(run: Callable[[CheckContext], None]) -> Callable[[CheckContext], None]:
            self.append(Check(name, title, run, needs, quick))
            return run

        return append


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        check: the check.
        outcome: passed, failed, not applicable or blocked.
        reason: what was seen, why it does not apply, or which check blocks it; empty when passed.
        root: id of the check that failed: this one, or the one that blocks it; empty otherwise.
    """

    check: Check
    outcome: Outcome
    reason: str = ""
    root: str = ""


@dataclass(eq=False)
class CheckContext:
    """One adapter, and what was learnt about it so far. Every check builds models of its own.

    Attributes:
        adapter: what its author wrote for the kit.
        seed: of batches and routes.
        results: of the checks that ran, by id. No check runs twice.
    """

    adapter: AdapterUnderTest
    seed: int = 0
    results: dict[str, CheckResult] = field(default_factory=dict)

    def pair(self, case: Case | None = None) -> tuple[ModelUnderTest, AttachedModel]:
        """A new model and the adapter attached to it."""
        # a new model each time: a check may leave hooks and gradients behind, and the next one must not see them
        model = self.adapter.build(case or Case())
        return model, self.adapter.attach(model)

    def untouched(self, case: Case | None = None) -> ModelUnderTest:
        """The same model without the adapter."""
        return self.adapter.build(case or Case())

    def batch(self, *lengths: int, seed: int = 0, padding: Padding = "none") -> Batch:
        """Seeded sequences of these lengths."""
        rng = np.random.default_rng([self.seed, seed])
        return Batch(tuple(rng.integers(1, self.adapter.vocabulary, n).astype(np.int32) for n in lengths), padding)

    @cached_property
    def base(self) -> Batch:
        """Three sequences of one length."""
        # so that nothing is padded: padding has checks of its own
        return self.batch(12, 12, 12)

    @cached_property
    def native(self) -> Seen:
        """The untouched model on the base batch."""
        return self.untouched().forward(self.base, grad=False).seen

    @cached_property
    def spec(self) -> RoutingSpec:
        """The spec of the family's own model, as attached."""
        spec = self.pair()[1].spec
        spec.require_alike("the kit", "build a model with layers of one size")
        return spec

    def trace_of(self, routes: Sequence[NDArray[Any]], batch: Batch, spec: RoutingSpec | None = None) -> RoutingTrace:
        """A trace of the batch from one array [rows, L, K] per sequence."""
        return RoutingTrace.from_sequences(spec or self.spec, batch.sequences, routes, weight_version=FOREIGN_VERSION)

    def foreign(self, spec: RoutingSpec, batch: Batch, *, seed: int = 1, low: int = 0) -> RoutingTrace:
        """Random routes of no relation to the model, for every token, from the experts `low` and up."""
        rng = np.random.default_rng([self.seed, seed])
        shape = (spec.num_layers, spec.num_experts - low)
        # ranks of random numbers are distinct, as the picks of a row must be
        routes = [low + np.argsort(rng.random((n, *shape)), axis=-1)[..., : spec.top_k] for n in batch.lengths]
        return self.trace_of(routes, batch, spec)

    def native_trace(self) -> RoutingTrace:
        """The untouched model's own routes of the base batch, without the last token's row."""
        routes = np.split(self.native.ids_NLK, len(self.base.sequences))
        # as engines return them, which never compute the last sampled token
        return self.trace_of([r[:-1] for r in routes], self.base)

    @cached_property
    def native_replay(self) -> Seen:
        """Forward of the attached model under its own routes."""
        return self.replayed(self.native_trace())

    def replayed(self, trace: RoutingTrace, batch: Batch | None = None) -> Seen:
        """Run a new attached model under a trace, on the base batch or another."""
        model, handle = self.pair()
        with handle.replay(trace):
            return model.forward(batch or self.base, grad=False).seen

    @cached_property
    def placement(self) -> Misplaced | None:
        """Misplaced foreign routes, with and without a row for the last token; None where all are in place."""
        found = None
        # T rows and T - 1 rows: an adapter that counts from the end is right with one of them alone
        for absent in (0, 1):
            wanted = self.foreign(self.spec, self.base)
            if absent:
                wanted = without_last_rows(wanted)
            seen = self.replayed(wanted)
            found = found or misplaced(wanted, seen.ids_NLK, self.native.ids_NLK)
        return found


def without_last_rows(trace: RoutingTrace) -> RoutingTrace:
    """The same routes, as an engine returns them: none for the last token of each sequence."""
    heads = trace.truncated(trace.lengths - 1)
    tails = [trace.tokens(s)[-1:] for s in range(len(trace))]
    return heads.continued_by(RoutingTrace.unrouted(trace.spec, tails))


def require(condition: bool | np.bool_, message: str) -> None:
    """Raise `CheckFailed` with the message unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


def refused(action: Callable[[], Any]) -> str | None:
    """The message with which foreroute refused the action; None when it went through."""
    try:
        action()
    except ForerouteError as error:
        return str(error) or type(error).__name__
    return None


def unless_refused(action: Callable[[], Any]) -> Any:
    """Return what the action returned; None where foreroute refused it."""
    try:
        return action()
    except ForerouteError:
        return None


@dataclass(frozen=True)
class Misplaced:
    """A mistake of placement."""

    check: str  # id of the check that is about it; "routes-followed" when it has no name
    sentence: str  # what was seen


def misplaced(wanted: RoutingTrace, seen_NLK: NDArray[Any], native_NLK: NDArray[Any]) -> Misplaced | None:
    """Compare what the experts were given with what a trace asked for; None where every routed row was followed.

    `native_NLK` is what the untouched model executes on the same tokens.
    """
    if seen_NLK.shape != wanted.expert_ids_NLK.shape:
        sentence = f"the probe saw rows of shape {seen_NLK.shape}, the trace has {wanted.expert_ids_NLK.shape}"
        return Misplaced("routes-followed", sentence)
    valid = wanted.valid_N
    # as sets: the order of picks changes nothing but roundings of a sum
    wrong_RL = ~same_sets(seen_NLK, wanted.expert_ids_NLK)[valid]
    if not wrong_RL.any():
        return None
    # before any other name: a model that ignores the trace may look shifted by chance
    if same_sets(seen_NLK, native_NLK).all():
        return Misplaced("silent-no-op", "no layer followed the trace, and nothing was raised")
    # A layer that ignores the trace differs in nearly all rows, one with single misplaced rows in few.
    whole = wrong_RL.mean(axis=0) > 0.6
    with np.errstate(invalid="ignore"):  # what was executed may hold an expert twice, which no trace does
        named = explain(wanted, replace(wanted, expert_ids_NLK=seen_NLK.astype(wanted.spec.id_dtype)), names=_NAMES)
    if named.defect in _CHECK_OF:
        return Misplaced(_CHECK_OF[named.defect], named.sentence)
    if whole.any() and not wrong_RL[:, ~whole].any() and not whole.all():
        layers = ", ".join(str(wanted.spec.layers[int(i)]) for i in np.flatnonzero(whole))
        return Misplaced("silent-no-op", f"{layers} did not follow the trace, and nothing was raised")
    return Misplaced("routes-followed", _first(wanted, seen_NLK, wrong_RL))


def require_followed(wanted: RoutingTrace, seen: Seen, native: Seen, where: str = "") -> None:
    """Raise `CheckFailed` where `misplaced` finds a mistake; `where` is what it then begins with."""
    found = misplaced(wanted, seen.ids_NLK, native.ids_NLK)
    if found is not None:
        raise CheckFailed(f"{where}: {found.sentence}" if where else found.sentence)


def require_foreign_followed(context: CheckContext, case: Case, *, low: int = 0, where: str = "") -> None:
    """Raise `CheckFailed` unless a model of another shape follows foreign routes, from the experts `low` and up."""
    model, handle = context.pair(case)
    wanted = context.foreign(handle.spec, context.base, low=low)
    with handle.replay(wanted):
        seen = model.forward(context.base, grad=False).seen
    native = context.untouched(case).forward(context.base, grad=False).seen
    require_followed(wanted, seen, native, where)


def _first(wanted: RoutingTrace, seen_NLK: NDArray[Any], wrong_RL: NDArray[np.bool_]) -> str:
    """Say how much was not followed, and the first decision that was not."""
    routed = np.flatnonzero(wanted.valid_N)
    at, layer = (int(i) for i in np.argwhere(wrong_RL)[0])
    row = int(routed[at])
    sequence, position = place_of(row, wanted.offsets)
    return (
        f"{int(wrong_RL.sum())} of {wrong_RL.size} routing decisions were not followed; first: sequence "
        f"{sequence}, position {position}, {wanted.spec.layers[layer]} asked for "
        f"{wanted.expert_ids_NLK[row, layer].tolist()} and got {seen_NLK[row, layer].tolist()}"
    )

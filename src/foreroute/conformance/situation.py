"""What several checks need: batches, routes, the untouched model's behaviour, and where replayed routes ended up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.conformance.adapter import (
    AdapterUnderTest,
    AttachedModel,
    Batch,
    Case,
    ModelUnderTest,
    Padding,
    Seen,
)
from foreroute.conformance.misplaced import Misplaced, misplaced
from foreroute.errors import ForerouteError
from foreroute.trace import RoutingSpec, RoutingTrace

FOREIGN_VERSION = 3


class Broken(Exception):  # noqa: N818
    """Raised by a check whose requirement is not met; the message says what was seen."""


class Blocked(Exception):  # noqa: N818
    """Raised by a check that can say nothing because another one failed; the message is the other's id."""


@dataclass(eq=False)
class Situation:
    """One adapter, and what was learnt about it so far. Every check builds models of its own."""

    adapter: AdapterUnderTest
    seed: int = 0

    def pair(self, case: Case | None = None) -> tuple[ModelUnderTest, AttachedModel]:
        """A new model and the adapter attached to it."""
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
        """Three sequences of one length, so that nothing is padded."""
        return self.batch(12, 12, 12)

    @cached_property
    def native(self) -> Seen:
        """The untouched model on the base batch."""
        return self.untouched().forward(self.base, grad=False).seen

    @cached_property
    def spec(self) -> RoutingSpec:
        """The spec of the family's own model, as attached."""
        return self.pair()[1].spec

    def trace_of(self, routes: Sequence[NDArray[Any]], batch: Batch, spec: RoutingSpec | None = None) -> RoutingTrace:
        """A trace of the batch from one array [rows, L, K] per sequence."""
        return RoutingTrace.from_sequences(spec or self.spec, batch.sequences, routes, weight_version=FOREIGN_VERSION)

    def foreign(self, spec: RoutingSpec, batch: Batch, *, seed: int = 1, low: int = 0) -> RoutingTrace:
        """Random routes of no relation to the model, for every token, from the experts `low` and up."""
        rng = np.random.default_rng([self.seed, seed])
        shape = (spec.num_layers, spec.num_experts - low)
        routes = [low + np.argsort(rng.random((n, *shape)), axis=-1)[..., : spec.top_k] for n in batch.lengths]
        return self.trace_of(routes, batch, spec)

    def native_trace(self) -> RoutingTrace:
        """The untouched model's own routes of the base batch, without the last token's row."""
        routes = np.split(self.native.ids_NLK, len(self.base.sequences))
        return self.trace_of([r[:-1] for r in routes], self.base)

    @cached_property
    def native_replay(self) -> Seen:
        """What the attached model did under its own routes."""
        self.require_placement()
        model, handle = self.pair()
        with handle.replay(self.native_trace()):
            return model.forward(self.base, grad=False).seen

    @cached_property
    def placement(self) -> Misplaced | None:
        """Where foreign routes, with and without a row for the last token, ended up; None where they belong."""
        found = None
        for absent in (0, 1):
            model, handle = self.pair()
            wanted = self.foreign(handle.spec, self.base)
            if absent:
                wanted = without_last_rows(wanted)
            with handle.replay(wanted):
                seen = model.forward(self.base, grad=False).seen
            found = found or misplaced(wanted, seen.ids_NLK, self.native.ids_NLK)
        return found

    def require_placement(self) -> None:
        """Raise `Blocked` unless routes reach their experts in the simplest of cases."""
        if self.placement is not None:
            raise Blocked(self.placement.check)


def without_last_rows(trace: RoutingTrace) -> RoutingTrace:
    """The same routes, as an engine returns them: none for the last token of each sequence."""
    heads = trace.truncated(trace.lengths - 1)
    tails = [trace.tokens(s)[-1:] for s in range(len(trace))]
    return heads.continued_by(RoutingTrace.unrouted(trace.spec, tails))


def require(condition: bool | np.bool_, message: str) -> None:
    """Raise `Broken` with the message unless the condition holds."""
    if not condition:
        raise Broken(message)


def refused(action: Callable[[], Any]) -> str | None:
    """The message with which foreroute refused the action; None when it went through."""
    try:
        action()
    except ForerouteError as error:
        return str(error) or type(error).__name__
    return None


def same_sets(wanted: NDArray[Any], seen: NDArray[Any]) -> NDArray[np.bool_]:
    """[...], whether picks [..., K] are the same sets."""
    a, b = np.sort(np.asarray(wanted, np.int64), -1), np.sort(np.asarray(seen, np.int64), -1)
    return np.asarray((a == b).all(axis=-1))

"""What the product refuses or does not do, done on purpose: routes shifted by one token, and a look at every replay.

The guards compare tokens, weight versions and models; a wiring that is off by one in its own indices has all of these
right. This is what such a defect does when nothing stops it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters import hf
from foreroute.capture import Generation, Sampling
from foreroute.mismatch import LiveAgreement
from foreroute.trace import RoutingTrace
from foreroute.train import run
from foreroute.train.engines import Engine
from foreroute.train.whole import Whole


def shifted(trace: RoutingTrace) -> RoutingTrace:
    """Each token has the route of the token before it in its sequence, the first that of the last that has one.

    Tokens, versions and validity stay as they are.
    """
    ids_NLK = trace.expert_ids_NLK.copy()
    for start, stop in zip(trace.offsets[:-1], trace.offsets[1:], strict=True):
        rows = start + np.flatnonzero(trace.valid_N[start:stop])
        ids_NLK[rows] = trace.expert_ids_NLK[np.roll(rows, 1)]
    return replace(trace, expert_ids_NLK=ids_NLK)


@contextmanager
def shifting_engine() -> Iterator[None]:
    """While this is open, engines of `foreroute.train.train` hand out shifted routes."""
    make = run.make_engine

    def make_shifting(*arguments: Any) -> Engine:
        return _Shifting(make(*arguments))

    run.make_engine = make_shifting
    try:
        yield
    finally:
        run.make_engine = make


class _Shifting:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self._engine.weight_version = version

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._engine.load_weights(weights, version)

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        generation = self._engine.generate(prompts, sampling, generator)
        return replace(generation, trace=shifted(generation.trace))

    def close(self) -> None:
        self._engine.close()


class Staleness:
    """How much of the replayed routes the routers would have chosen themselves, by mini-step of the update."""

    def __init__(self) -> None:
        self._mini_step: int | None = None
        self._sums: dict[int, LiveAgreement] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this is open, every replay in an update is looked at."""
        replay, running, staleness = hf.RoutedModel.replay, Whole.running, self

        @contextmanager
        def watched_replay(routed: Any, trace: RoutingTrace, **settings: Any) -> Iterator[Any]:
            updating = staleness._mini_step is not None
            with replay(routed, trace, **settings, telemetry=updating) as session:
                yield session
            if updating:
                staleness._add(session.agreement())

        @contextmanager
        def watched_running(whole: Whole, stage: Any, *, updating: bool = False) -> Iterator[None]:
            with running(whole, stage, updating=updating):
                staleness._mini_step = stage.after if updating else None
                yield
                staleness._mini_step = None

        with _replaced(hf.RoutedModel, "replay", watched_replay), _replaced(Whole, "running", watched_running):
            yield

    def differing_by_mini_step(self) -> list[float]:
        """Share of (token, layer) whose own selection is another set than the replayed one; empty without replay."""
        return [self._sums[number].routing.differing_share for number in sorted(self._sums)]

    def _add(self, agreement: LiveAgreement) -> None:
        number = self._mini_step
        assert number is not None, "replays outside an update are not added"
        self._sums[number] = self._sums[number] + agreement if number in self._sums else agreement


@contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

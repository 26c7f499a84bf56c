"""The wrapper of a forward step: Megatron's schedules call it, and every micro-batch brings its routes along."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import update_wrapper
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from foreroute.adapters.megatron.forward_args import Call
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.core.passes import Listener, Pass, Rows, Watch
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.mismatch import LiveAgreement
from foreroute.replay import Policy, ReplaySession, Telemetry, added_up
from foreroute.trace import RoutingTrace

BatchRoutes = RoutingTrace | RouteShard
RoutesIn = Callable[[Any], BatchRoutes | None]
OpenSession = Callable[[BatchRoutes, dict[int, Telemetry]], ReplaySession]


def routes_in(batch: Any) -> BatchRoutes | None:
    """What a batch has under "routes", as an item or as an attribute; None where it has nothing there."""
    return batch.get("routes") if isinstance(batch, Mapping) else getattr(batch, "routes", None)


class ReplayingStep:
    """A forward step as `get_forward_backward_func()` takes it. Made by `RoutedMegatron.replaying`.

    Args:
        forward_step: `forward_step(data_iterator, model, ...)`.
        routes_of: finds the routes in a batch.
        open_session: a session on the routes of one micro-batch, adding to the given telemetry.
        listening: has the chunk of a model listened to, by the number of the chunk or its module.
        policy: how to replay.
    """

    def __init__(
        self,
        forward_step: Callable[..., Any],
        routes_of: RoutesIn,
        open_session: OpenSession,
        listening: Callable[[nn.Module, StepListener], AbstractContextManager[None]],
        policy: Policy,
    ) -> None:
        self._step = forward_step
        self._routes_of = routes_of
        self._open = open_session
        self._listening = listening
        self._policy = policy
        self._telemetry: dict[int, Telemetry] = {}
        update_wrapper(self, forward_step, updated=())  # a callable object keeps its attributes to itself

    def __call__(self, data_iterator: Iterator[Any] | None, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the step on one micro-batch.

        Raises:
            BatchMismatchError: when this stage is given no batches, or routes of another batch.
            ReplayError: when the batch brought routes and they were not replayed.
        """
        if data_iterator is None:
            raise BatchMismatchError(
                "this rank has no data iterator, so that its micro-batches bring no routes; give the batches to every "
                "pipeline stage and every tensor-parallel rank, or call the forward step unwrapped to route natively"
            )
        batches = WatchedBatches(data_iterator, self._routes_of)
        listener = StepListener(batches, lambda routes: self._open(routes, self._telemetry), self._policy)
        with self._listening(model, listener):
            result = self._step(batches, model, *args, **kwargs)
        listener.close()
        return result

    def agreement(self, chunk: int = 0) -> LiveAgreement:
        """As `ReplaySession.agreement`, over all micro-batches so far. Raises `ReplayError` likewise."""
        return added_up(self._telemetry, chunk, Telemetry.agreement)

    def expert_counts_LE(self, chunk: int = 0) -> NDArray[np.int64]:
        """As `ReplaySession.expert_counts_LE`, over all micro-batches so far. Raises `ReplayError` likewise."""
        return added_up(self._telemetry, chunk, lambda telemetry: telemetry.counts_LE)


class WatchedBatches:
    """An iterator over batches that remembers the routes of the one it gave last.

    Args:
        batches: of the schedule.
        routes_of: finds the routes in a batch.

    Attributes:
        taken: how many batches were given.
        routes: of the last one.
    """

    def __init__(self, batches: Iterator[Any], routes_of: RoutesIn) -> None:
        self._batches = batches
        self._routes_of = routes_of
        self.taken = 0
        self.routes: BatchRoutes | None = None

    def __iter__(self) -> WatchedBatches:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.taken += 1
        self.routes = self._routes_of(batch)
        if not (self.routes is None or isinstance(self.routes, RoutingTrace | RouteShard)):
            raise BatchMismatchError(
                f"the routes of a batch are a {type(self.routes).__name__}; expected a RoutingTrace, "
                "routed.shard(trace, layout), or None to route natively"
            )
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class StepListener(Listener):
    """Opens a session when the model runs in a forward step, on the routes of the batch that was taken.

    Args:
        batches: of the step.
        open_session: a session on some routes.
        policy: how to replay.

    Attributes:
        session: of the micro-batch; None before the model runs, and where it brought no routes.
    """

    def __init__(
        self, batches: WatchedBatches, open_session: Callable[[BatchRoutes], ReplaySession], policy: Policy
    ) -> None:
        self.watch = Watch(scores=policy.telemetry)
        self.session: ReplaySession | None = None
        self._batches = batches
        self._open = open_session

    def begin(self, chunk: int, call: Call) -> Rows | None:
        """Replay the routes of the batch, if it has any."""
        if self._batches.taken != 1:
            raise ReplayError(
                f"the forward step took {self._batches.taken} batches before it called the model; expected one, so "
                "that its routes are known"
            )
        if self._batches.routes is None:
            return None
        if self.session is None:
            self.session = self._open(self._batches.routes)
        return self.session.begin(chunk, call)

    def end(self, chunk: int, call: Call, current: Pass | None) -> None:
        """The session adds up."""
        if self.session is not None:
            self.session.end(chunk, call, current)

    def close(self) -> None:
        """Raise `ReplayError` if routes were brought and not replayed."""
        if self.session is not None:
            self.session.close()
        elif self._batches.routes is not None:
            raise ReplayError("the batch brought routes, and the forward step did not run the attached model")

"""The wrapper of a forward step: Megatron's schedules call it, and every micro-batch brings its routes along."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import update_wrapper
from typing import Any

from torch import nn

from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.replay import ReplaySession, Telemetry
from foreroute.replay.session import WithTelemetry
from foreroute.trace import RoutingTrace

BatchRoutes = RoutingTrace | RouteShard
RoutesIn = Callable[[Any], BatchRoutes | None]
Replay = Callable[[BatchRoutes], ReplaySession]


def routes_in(batch: Any) -> BatchRoutes | None:
    """What a batch has under "routes", as an item or as an attribute; None where it has nothing there."""
    return batch.get("routes") if isinstance(batch, Mapping) else getattr(batch, "routes", None)


class ReplayingStep(WithTelemetry):
    """A forward step as `get_forward_backward_func()` takes it. Made by `RoutedMegatron.replaying`.

    Args:
        forward_step: `forward_step(data_iterator, model, ...)`.
        routes_of: finds the routes in a batch.
        running: a step on the chunk of a model; what it yields opens a session on routes until the end of the step.
        telemetry: where these sessions add up what routers do; None where nobody asked.
    """

    def __init__(
        self,
        forward_step: Callable[..., Any],
        routes_of: RoutesIn,
        running: Callable[[nn.Module], AbstractContextManager[Replay]],
        telemetry: Telemetry | None,
    ) -> None:
        self._step = forward_step
        self._routes_of = routes_of
        self._running = running
        self.telemetry = telemetry
        update_wrapper(self, forward_step, updated=())  # a callable object keeps its attributes to itself

    def __call__(self, data_iterator: Iterator[Any] | None, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the step on one micro-batch.

        Raises:
            BatchMismatchError: when this stage is given no batches, or routes of another batch.
            ReplayError: when it did not take one batch, or the routes of that were not replayed.
        """
        if data_iterator is None:
            raise BatchMismatchError(
                "this rank has no data iterator, so that its micro-batches bring no routes; give the batches to every "
                "pipeline stage and every tensor-parallel rank, or call the forward step unwrapped to route natively"
            )
        with self._running(model) as replay:
            batches = WatchedBatches(data_iterator, self._routes_of, replay)
            result = self._step(batches, model, *args, **kwargs)
        batches.require_one()
        if batches.session is not None:
            batches.session.require_replayed()
        return result


class WatchedBatches:
    """The batches of one forward step, which takes one of them and so begins to replay its routes.

    Args:
        batches: of the schedule.
        routes_of: finds the routes in a batch.
        replay: opens a session on them.

    Attributes:
        session: of the batch that was taken; None before, and where it brought no routes.
    """

    def __init__(self, batches: Iterator[Any], routes_of: RoutesIn, replay: Replay) -> None:
        self._batches = batches
        self._routes_of = routes_of
        self._replay = replay
        self._num_taken = 0
        self.session: ReplaySession | None = None

    def __iter__(self) -> WatchedBatches:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._num_taken += 1
        self.require_one()
        routes = self._routes_of(batch)
        if not (routes is None or isinstance(routes, BatchRoutes)):
            raise BatchMismatchError(
                f"the routes of a batch are a {type(routes).__name__}; expected a RoutingTrace, "
                "routed.shard(trace, layout), or None to route natively"
            )
        if routes is not None:
            self.session = self._replay(routes)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def require_one(self) -> None:
        """Raise `ReplayError` unless the step took one batch."""
        if self._num_taken != 1:
            raise ReplayError(
                f"the forward step took {self._num_taken} batches; expected one before it calls the model, so that its "
                "routes are known"
            )

"""The wrapper of a forward step: Megatron's schedules call it, and every micro-batch brings its routes along."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from torch import nn

from foreroute.adapters.megatron.hooks import ChunkHooks
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.replay import Policy, ReplaySession, Telemetry
from foreroute.replay.session import WithTelemetry

if TYPE_CHECKING:
    from foreroute.adapters.megatron.routed_megatron import RoutedMegatron


def routes_in(batch: Any) -> Any:
    """Find what a batch has under "routes", as an item or as an attribute. Raises `BatchMismatchError` without one."""
    if isinstance(batch, Mapping) and "routes" in batch:
        return batch["routes"]
    if not isinstance(batch, Mapping) and hasattr(batch, "routes"):
        return batch.routes
    # forgotten or misspelled, they would train on the trainer's own routes without a word
    keys = f" with the keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
    raise BatchMismatchError(
        f"a batch, a {type(batch).__name__}{keys}, has none under 'routes'; put routed.shard(trace, layout) there, or "
        "None to route it natively, or say by routes_of= where they are"
    )


class ReplayingStep(WithTelemetry):
    """A forward step as `get_forward_backward_func()` takes it. Made by `RoutedMegatron.replaying`."""

    def __init__(
        self,
        routed: RoutedMegatron,
        forward_step: Callable[..., Any],
        routes_of: Callable[[Any], Any],
        policy: Policy,
        telemetry: Telemetry | None,
    ) -> None:
        self._routed, self._step, self._routes_of, self._policy = routed, forward_step, routes_of, policy
        self.telemetry = telemetry
        update_wrapper(self, forward_step, updated=())  # a callable object keeps its attributes to itself

    def __call__(self, data_iterator: Iterator[Any] | None, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the step on one micro-batch, and raise `ReplayError` unless its routes were replayed."""
        if data_iterator is None:
            raise BatchMismatchError(
                "this rank has no data iterator, so that its micro-batches bring no routes; give the batches to every "
                "pipeline stage and every tensor-parallel rank, or call the forward step unwrapped to route natively"
            )
        with ExitStack() as stack:
            batches = _StepBatches(self, data_iterator, self._routed.hooks_of(model), stack)
            result = self._step(batches, model, *args, **kwargs)
        batches.require_one()
        return result

    def begin_replay(self, batch: Any, hooks: ChunkHooks, stack: ExitStack) -> None:
        """Replay the routes of a batch, unless they are None, until the stack is left."""
        routes = self._routes_of(batch)
        if routes is None:
            return
        found = self._routed.routes_of(routes, None, self._policy)
        session = ReplaySession(found, self._policy, self._routed.checks, self.telemetry)
        stack.enter_context(self._routed.open_replay(session, *session.beside, chunks=[hooks]))


class _StepBatches:
    """The batches of one forward step, which takes one of them and so begins to replay its routes."""

    def __init__(self, step: ReplayingStep, batches: Iterator[Any], hooks: ChunkHooks, stack: ExitStack) -> None:
        self._step, self._batches, self._hooks, self._stack = step, batches, hooks, stack
        self._num_taken = 0

    def __iter__(self) -> _StepBatches:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._num_taken += 1
        self.require_one()
        self._step.begin_replay(batch, self._hooks, self._stack)
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

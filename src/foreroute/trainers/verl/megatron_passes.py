"""What is replayed, executed and measured in the passes of verl's Megatron engine, under R3.

verl gives Megatron's schedule all micro-batches of a batch in one call. Their routes are decoded, checked and cut when
verl has split the batch, before the first of them runs: that is when a plan can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from megatron.core import parallel_state as mpu
from verl.workers.engine.megatron import transformer_impl

from foreroute.adapters import megatron
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.adapters.megatron.schedule import ReplayingStep
from foreroute.errors import ReplayError
from foreroute.layout import pack
from foreroute.trace import RoutingTrace
from foreroute.trainers.checks import check_first_rollout
from foreroute.trainers.verl.comparison import RolloutComparison
from foreroute.trainers.verl.planning import PlannedBatch, PlanningMegatronConfig, PlanSums
from foreroute.trainers.verl.protocol import require_routed, trace_of

Step = Callable[[Iterator[Any], Any], Any]
"""verl's `forward_step(batch_iter, model)`, its other parameters bound."""


@dataclass(frozen=True)
class RoutedMicroBatch:
    """One micro-batch of verl.

    Attributes:
        data: verl's.
        routes: of the rollout.
        shard: the same, cut to this rank; rows that the rollout did not route are spread.
    """

    data: Any
    routes: RoutingTrace
    shard: RouteShard


class MegatronPasses:
    """The passes of one engine.

    Args:
        engine: verl's, initialised, its parameters on their device.

    Attributes:
        routed: its model.
        comparison: of the rollout with what ran.
        first_rollout_checked: whether the first routes of the rollout were held against the model's own.
    """

    def __init__(self, engine: Any) -> None:
        self.first_rollout_checked = False
        self.routed = megatron.attach(engine.module)
        self.comparison = RolloutComparison(self.routed.spec, engine.get_data_parallel_group, judges_weights=True)
        config = engine.engine_config
        self._planning = config if isinstance(config, PlanningMegatronConfig) else None
        self._plans = PlanSums()
        self._micro_batches: list[RoutedMicroBatch] = []
        self._num_steps = 0
        self._planned: PlannedBatch | None = None
        self._replaying: ReplayingStep | None = None

    @contextmanager
    def batch(self, data: Any, *, update: bool) -> Iterator[dict[str, float]]:
        """`RolloutComparison.batch`.

        Raises:
            ReplayError: when a micro-batch did not go through `forward_step`.
        """
        self._micro_batches, self._num_steps, self._planned = [], 0, None
        self._replaying = self.routed.replaying(_run, routes_of=self._routes_in, telemetry=update)
        with self.comparison.batch(update=update) as logs:
            with ExitStack() as executions, _told_of_micro_batches(partial(self._prepare, executions)):
                yield logs
            self._end_batch(data)
            if update:
                self.comparison.metrics.add_native(self._replaying.agreement().routing)
                if self._planning is not None:
                    logs.update(self._plans.flush())

    def step(self, step: Step, batches: Iterator[Any], model: Any, *, update: bool) -> Any:
        """A `forward_step` of verl on its next micro-batch, replayed, and measured as its pass asks for."""
        assert self._replaying is not None, "batch() comes first"
        current = self._micro_batches[self._num_steps]
        if not self.first_rollout_checked:
            check_first_rollout(self.routed, current.routes, lambda: step(iter([current.data]), model))
            self.first_rollout_checked = True
        if self._planned is not None:
            self._planned.begin(self._num_steps)
        self._num_steps += 1
        if not self.comparison.measures(update=update):
            return self._replaying(batches, model, step)
        with self.routed.record() as recording:
            output, loss = self._replaying(batches, model, step)
        executed = recording.trace().select(np.arange(len(current.data)))
        self.comparison.add(executed, current.routes, current.data, output.get("log_probs"), update=update)
        return output, loss

    def _prepare(self, executions: ExitStack, micro_batches: Sequence[Any]) -> None:
        """Read the routes, when verl has split the batch and nothing of it has run."""
        self._micro_batches = [self._micro_batch(data) for data in micro_batches]
        if self._planning is not None:
            shards = [each.shard for each in self._micro_batches]
            self._planned = PlannedBatch(self.routed, shards, self._planning, executions)

    def _end_batch(self, data: Any) -> None:
        if not self._micro_batches or self._num_steps != len(self._micro_batches):
            raise ReplayError(
                f"verl's Megatron engine ran {self._num_steps} of {len(self._micro_batches)} micro-batches of a batch "
                f"of {len(data)} through forward_step; the others were not replayed"
            )
        if self._planned is not None:
            self._plans.add(self._planned.loads(mpu.get_expert_model_parallel_group()))

    def _micro_batch(self, data: Any) -> RoutedMicroBatch:
        routes = trace_of(data, model=self.routed.spec)
        require_routed(routes, data)
        return RoutedMicroBatch(data, routes, self.routed.shard(routes, pack(routes.lengths), missing="spread"))

    def _routes_in(self, data: Any) -> RouteShard:
        current = self._micro_batches[self._num_steps - 1]
        if data is not current.data:
            raise ReplayError("Megatron's schedule runs other micro-batches than verl split the batch into")
        return current.shard


def _run(batches: Iterator[Any], model: Any, step: Step) -> Any:
    return step(batches, model)


@contextmanager
def _told_of_micro_batches(tell: Callable[[Sequence[Any]], None]) -> Iterator[None]:
    """Inside, `tell` is called with the micro-batches that verl splits a batch into: it has no method for that."""
    split = transformer_impl.prepare_micro_batches

    def told(*args: Any, **kwargs: Any) -> Any:
        micro_batches, indices = split(*args, **kwargs)
        tell(micro_batches)
        return micro_batches, indices

    transformer_impl.prepare_micro_batches = told
    try:
        yield
    finally:
        transformer_impl.prepare_micro_batches = split

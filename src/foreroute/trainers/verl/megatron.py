# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""verl's Megatron engine with foreroute's replay, and with plans: what is overridden, and what runs in its passes.

verl imports this module in every worker when it is told to, and then makes its engines from here:

    actor_rollout_ref.model.external_lib=foreroute.trainers.verl.megatron
    actor_rollout_ref.actor.megatron.router_replay.mode=R3
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True

Routes are replayed by foreroute's hooks in the place of verl's: a plan is executed on the rows of a replay, whose
micro-batch is known in every recomputation too. verl gives Megatron's schedule all micro-batches of a batch in one
call: their routes are decoded, checked and cut when verl has split the batch, before the first of them runs. That is
when a plan can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from foreroute.adapters.versions import require_peers

require_peers("torch", "megatron-core", "verl")

import verl
from megatron.core import parallel_state as mpu
from verl.workers.config import EngineRouterReplayConfig
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from foreroute.adapters import megatron
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.adapters.megatron.schedule import ReplayingStep
from foreroute.errors import ReplayError
from foreroute.layout import pack
from foreroute.trace import RoutingTrace
from foreroute.trainers.checks import require_overridden
from foreroute.trainers.verl.passes import EnginePasses
from foreroute.trainers.verl.planning import PlannedBatch, PlanningMegatronConfig, PlanSums
from foreroute.trainers.verl.protocol import require_routed, trace_of
from foreroute.trainers.verl.registry import take_place
from foreroute.trainers.verl.settings import replay_of, require_supported_by_megatron

DEVICE = "cuda"
"""On others verl has an engine of other makers, which keeps its own replay."""
Step = Callable[[Iterator[Any], Any], Any]
"""verl's `forward_step(batch_iter, model)`, its other parameters bound."""
SPLIT = "prepare_micro_batches"
"""By which verl splits a batch, among the globals of its engine's module: there is no method for that."""


class MegatronRoutingReplay(MegatronEngineWithLMHead):
    """verl's Megatron engine of language models with routing replay, and plans where its configuration has them.

    An engine that only runs forward is a reference, and is left alone.

    Attributes:
        replays_routes, executes_plans: what verl's registry is searched for.
        routing: what is replayed in which pass; None where nothing is.

    Raises:
        AttachError: for a release of mbridge that does not work.
        ConfigError: for settings under which replay is not supported, and plans without replay.
    """

    replays_routes = executes_plans = True
    routing: MegatronPasses | None = None

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        self._replays = replay_of(engine_config) != "disabled" and not engine_config.forward_only
        plans = isinstance(engine_config, PlanningMegatronConfig)
        require_supported_by_megatron(engine_config, model_config, replays=self._replays, plans=plans)
        if self._replays:
            if engine_config.vanilla_mbridge:
                require_peers("mbridge")
            # with a mode, verl would put its own replay into Megatron's classes
            engine_config = replace(engine_config, router_replay=EngineRouterReplayConfig())
        super().__init__(model_config, engine_config, *args, **kwargs)

    def initialize(self) -> None:
        """Build the model as verl does, and prove replay on it.

        Raises:
            AttachError: when the model is not replayable.
        """
        super().initialize()
        if self._replays:
            with self.eval_mode():
                self.routing = MegatronPasses(self)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """The passes of verl over a batch, of which each micro-batch was replayed.

        Raises:
            ReplayError: when one was not.
        """
        run = partial(super().forward_backward_batch, data, loss_function, forward_only)
        if self.routing is None:
            return run()
        self._updates = not forward_only
        return self.routing.run_batch(run, data, update=not forward_only)

    def forward_step(self, batch_iter: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """A pass of verl over a micro-batch, with its routes."""
        if self.routing is None:
            return super().forward_step(batch_iter, model, *args, **kwargs)

        def step(batches: Any, model: Any) -> Any:
            return super(MegatronRoutingReplay, self).forward_step(batches, model, *args, **kwargs)

        return self.routing.step(step, batch_iter, model, update=self._updates)


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


class MegatronPasses(EnginePasses):
    """The passes of one engine, under R3.

    Args:
        engine: verl's, initialised, its parameters on their device.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, megatron.attach(engine.module), judges_weights=True)
        config = engine.engine_config
        self._planning = config if isinstance(config, PlanningMegatronConfig) else None
        self._plans = PlanSums()
        self._micro_batches: list[RoutedMicroBatch] = []
        self._planned: PlannedBatch | None = None
        self._replaying: ReplayingStep | None = None

    @contextmanager
    def batch(self, data: Any, *, update: bool) -> Iterator[dict[str, float]]:
        """Around a batch of verl, whose micro-batches are prepared when verl has split it.

        Raises:
            ReplayError: when a micro-batch did not go through `forward_step`.
        """
        self._micro_batches, self._num_steps, self._planned = [], 0, None
        self._replaying = self.routed.replaying(_run, routes_of=self._routes_in, telemetry=update)
        with super().batch(data, update=update) as logs:
            with ExitStack() as executions, self._preparing(executions):
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
        self.check_first(current.routes, lambda: step(iter([current.data]), model))
        if self._planned is not None:
            self._planned.begin(self._num_steps)
        self._num_steps += 1
        run = partial(self._replaying, batches, model, step)
        (output, loss), executed = self.recorded(run, current.data, update=update)
        if executed is not None:
            self.comparison.add(executed, current.routes, current.data, output.get("log_probs"), update=update)
        return output, loss

    def _preparing(self, executions: ExitStack) -> AbstractContextManager[Any]:
        """While the context is open, verl's splitting of a batch tells of the micro-batches."""
        split = getattr(transformer_impl, SPLIT)

        def told(*args: Any, **kwargs: Any) -> Any:
            micro_batches, indices = split(*args, **kwargs)
            self._prepare(executions, micro_batches)
            return micro_batches, indices

        return patch.object(transformer_impl, SPLIT, told)

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
            self._planned.add_to(self._plans, mpu.get_expert_model_parallel_group())

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


def register() -> None:
    """Have verl make this engine for the strategy megatron.

    Raises:
        AttachError: when this release of verl has no longer what replay stands on, or another engine took its place.
    """
    require_overridden("verl", verl.__version__, MegatronRoutingReplay, MegatronEngineWithLMHead)
    take_place(MegatronRoutingReplay, MegatronEngineWithLMHead, "megatron", device=DEVICE)


register()

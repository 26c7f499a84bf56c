# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""verl's Megatron engine with foreroute's replay, and with plans: what is overridden, and what runs in its passes.

verl imports this module in every worker when it is told to, and then makes its engines from here:

    actor_rollout_ref.model.external_lib=foreroute.trainers.verl.megatron
    actor_rollout_ref.actor.megatron.router_replay.mode=R3
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True

Routes are replayed by foreroute's hooks in the place of verl's: a plan is executed on the rows of a replay, whose
micro-batch is known in every recomputation too. verl gives Megatron's schedule all micro-batches of a batch in one
call: their routes are decoded, checked and cut when verl has split the batch, before the first of them runs. That is
when a plan can be made, and all ranks of a model do something together: inside of the call, stages are in different
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from foreroute.adapters.versions import require_peers

require_peers("torch", "megatron-core", "verl")

import numpy as np
import torch.distributed as dist
import verl
from megatron.core import parallel_state as mpu
from torch import Tensor
from verl.utils.device import get_device_id
from verl.workers.config import EngineRouterReplayConfig
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from foreroute.adapters import megatron
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.errors import ReplayError
from foreroute.layout import pack
from foreroute.trace import RoutingTrace, concatenate
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
SCHEDULE = "get_forward_backward_func"
"""By which verl finds Megatron's schedule, likewise."""


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
        return run() if self.routing is None else self.routing.run_batch(run, data, update=not forward_only)


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

    verl hands all micro-batches of a batch to one call of Megatron's schedule, which runs them through stages and
    virtual chunks in an order of its own. What all ranks of a model do together stands in front of that call, and
    behind it.

    Args:
        engine: verl's, initialised, its parameters on their device.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, megatron.attach(engine.module), judges_weights=True)
        config = engine.engine_config
        self._planning = config if isinstance(config, PlanningMegatronConfig) else None
        self._plans = PlanSums()
        self._chunks = engine.module
        # verl pads each sequence to a multiple, which tensor-parallel ranks share
        self._align = mpu.get_tensor_model_parallel_world_size()
        self._micro_batches: list[RoutedMicroBatch] = []
        self._planned: PlannedBatch | None = None

    @contextmanager
    def batch(self, data: Any, *, update: bool) -> Iterator[dict[str, float]]:
        """Around a batch of verl, whose micro-batches are prepared when verl has split it.

        Raises:
            ReplayError: when a micro-batch did not go through the schedule.
        """
        self._micro_batches, self._planned = [], None
        with super().batch(data, update=update) as logs:
            with ExitStack() as executions, self._preparing(executions), self._replaying(update):
                yield logs
            logs.update(self._ended(update))

    def _ended(self, update: bool) -> dict[str, float]:
        """What plans have to log of a batch that is over."""
        if update:
            self.comparison.metrics.share_native(_over_model)
        if self._planned is not None:
            groups = mpu.get_expert_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
            self._planned.add_to(self._plans, *groups)
        return self._plans.flush() if update and self._planning is not None else {}

    def _preparing(self, executions: ExitStack) -> AbstractContextManager[Any]:
        """While the context is open, verl's splitting of a batch tells of the micro-batches."""
        return _told(SPLIT, partial(self._prepare, executions))

    def _replaying(self, update: bool) -> AbstractContextManager[Any]:
        """While the context is open, verl is given a schedule that replays."""
        return _told(SCHEDULE, partial(self._scheduled, update))

    def _prepare(self, executions: ExitStack, found: tuple[Sequence[Any], Any]) -> tuple[Sequence[Any], Any]:
        """Read the routes, when verl has split the batch and nothing of it has run."""
        self._micro_batches = [self._micro_batch(data) for data in found[0]]
        if self._planning is not None:
            shards = [each.shard for each in self._micro_batches]
            # stages run other micro-batches at a time, so that they agree on a plan before the first
            at_once = mpu.get_pipeline_model_parallel_world_size() > 1
            self._planned = PlannedBatch(self.routed, shards, self._planning, executions, at_once=at_once)
        return found

    def _scheduled(self, update: bool, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's schedule for the batch, replayed, and measured as its pass asks for."""

        def run(*, forward_step_func: Step, **given: Any) -> Any:
            self._check_first(schedule, forward_step_func, given)
            if self._planned is not None:
                self._planned.begin(0)
            log_probs: list[Any] = []
            replaying = self.routed.replaying(forward_step_func, routes_of=self._routes_in, telemetry=update)
            before = self._num_steps

            def step(batches: Iterator[Any], model: Any) -> Any:
                if self._planned is not None and self._num_steps > before:
                    self._planned.begin(self._num_steps - before)
                self._num_steps += 1
                output, loss = replaying(batches, model)
                if isinstance(output, Mapping):  # of the last stage
                    log_probs.append(output.get("log_probs"))
                return output, loss

            with ExitStack() as stack:
                measures = self.comparison.measures(update=update)
                recording = stack.enter_context(self.routed.record()) if measures else None
                result = schedule(forward_step_func=step, **given)
            self._require_all(self._num_steps - before)
            if recording is not None:
                self._compare(recording.trace(), log_probs or [None] * len(self._micro_batches), update=update)
            if update:
                chunks = [chunk for chunk, hooks in enumerate(self.routed.chunks) if hooks.layers]
                self.comparison.metrics.add_native(*(replaying.agreement(chunk).routing for chunk in chunks))
            return result

        return run

    def _check_first(self, schedule: Callable[..., Any], step: Step, given: dict[str, Any]) -> None:
        # virtual stages take as many micro-batches at a time as there are stages
        num_first = mpu.get_pipeline_model_parallel_world_size() if len(self._chunks) > 1 else 1
        first = self._micro_batches[:num_first]
        batches = transformer_impl.make_batch_generator([each.data for each in first], vpp_size=len(self._chunks))
        how = given | {"data_iterator": batches, "num_microbatches": num_first, "forward_only": True}
        routes, forward = concatenate([each.routes for each in first]), partial(schedule, forward_step_func=step, **how)
        self.check_first(routes, forward, padded_to=self._align)

    def _require_all(self, num_forwards: int) -> None:
        expected = len(self._micro_batches) * len(self._chunks)
        if num_forwards != expected:
            raise ReplayError(
                f"Megatron's schedule ran {num_forwards} forwards of {len(self._micro_batches)} micro-batches on "
                f"{len(self._chunks)} chunks; expected {expected}, each of which is replayed"
            )

    def _compare(self, executed: RoutingTrace, log_probs: Sequence[Any], *, update: bool) -> None:
        """Routes of all micro-batches in their order; log-probs are those of the last stage."""
        first = 0
        for each, found in zip(self._micro_batches, log_probs, strict=True):
            mine = executed.select(np.arange(first, first + len(each.routes)))
            first += len(each.routes)
            # without the padding of parallel ranks
            self.comparison.add(mine.truncated(each.routes.lengths), each.routes, each.data, found, update=update)

    def _micro_batch(self, data: Any) -> RoutedMicroBatch:
        routes = trace_of(data, model=self.routed.spec)
        require_routed(routes, data)
        layout = pack(routes.lengths, align=self._align)
        return RoutedMicroBatch(data, routes, self.routed.shard(routes, layout, missing="spread"))

    def _routes_in(self, data: Any) -> RouteShard:
        for each in self._micro_batches:
            if data is each.data:
                return each.shard
        raise ReplayError("Megatron's schedule runs other micro-batches than verl split the batch into")


def _told(name: str, told: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """While the context is open, what a global function of the engine's module returns goes through `told`."""
    own = getattr(transformer_impl, name)
    return patch.object(transformer_impl, name, lambda *args, **kwargs: told(own(*args, **kwargs)))


def _over_model(sums: Tensor) -> Tensor:
    """The sum over the ranks of one model, which are all ranks but those of other data."""
    on_device = sums.to(get_device_id())
    for group in (mpu.get_model_parallel_group(), mpu.get_context_parallel_group()):
        dist.all_reduce(on_device, group=group)
    return on_device


def register() -> None:
    """Have verl make this engine for the strategy megatron.

    Raises:
        AttachError: when this release of verl has no longer what replay stands on, or another engine took its place.
    """
    require_overridden("verl", verl.__version__, MegatronRoutingReplay, MegatronEngineWithLMHead)
    take_place(MegatronRoutingReplay, MegatronEngineWithLMHead, "megatron", device=DEVICE)


register()

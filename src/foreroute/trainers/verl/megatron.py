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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any
from unittest.mock import patch

from foreroute.adapters.versions import require_peers

require_peers("torch", "megatron-core", "verl")

import numpy as np
import verl
from megatron.core import parallel_state as mpu
from numpy.typing import NDArray
from torch import Tensor
from verl.workers.config import EngineRouterReplayConfig
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from foreroute.adapters import megatron
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.errors import ReplayError
from foreroute.layout import Layout, pack, pad
from foreroute.trace import RoutingTrace, concatenate
from foreroute.trainers.checks import require_overridden
from foreroute.trainers.plan_sums import PlanSums
from foreroute.trainers.verl.comparison import over_ranks
from foreroute.trainers.verl.passes import EnginePasses
from foreroute.trainers.verl.planning import PlannedBatch, PlanningMegatronConfig
from foreroute.trainers.verl.protocol import FIELD, routed_experts
from foreroute.trainers.verl.registry import take_place
from foreroute.trainers.verl.settings import Replay, replay_of, require_supported_by_megatron

DEVICE = "cuda"
"""On others verl has an engine of other makers, which keeps its own replay."""
Step = Callable[[Iterator[Any], Any], Any]
"""verl's `forward_step(batch_iter, model)`, its other parameters bound."""
SPLIT = "prepare_micro_batches"
"""By which verl splits a batch, among the globals of its engine's module: there is no method for that."""
SCHEDULE = "get_forward_backward_func"
"""By which verl finds Megatron's schedule, among the same globals."""


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
        self._replay: Replay = "disabled" if engine_config.forward_only else replay_of(engine_config)
        replays, plans = self._replay != "disabled", isinstance(engine_config, PlanningMegatronConfig)
        require_supported_by_megatron(engine_config, model_config, replays=replays, plans=plans)
        if replays:
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
        if self._replay != "disabled":
            with self.eval_mode():
                self.routing = MegatronPasses(self, self._replay)

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
        layout: where its sequences are, before ranks share it.
        routes: to replay; None where R2 records them.
        shard: the same, cut to this rank; rows that the rollout did not route are spread.
    """

    data: Any
    layout: Layout
    routes: RoutingTrace | None
    shard: RouteShard | None


class MegatronPasses(EnginePasses):
    """The passes of one engine.

    verl hands all micro-batches of a batch to one call of Megatron's schedule, which runs them through stages and
    virtual chunks in an order of its own. What all ranks of a model do together stands in front of that call, and
    behind it.

    Args:
        engine: verl's, initialised, its parameters on their device.
        replay: R2 or R3.
    """

    def __init__(self, engine: Any, replay: Replay) -> None:
        super().__init__(engine, megatron.attach(engine.module), replay)
        self._config = config = engine.engine_config
        self._planning = config if isinstance(config, PlanningMegatronConfig) else None
        self._plans = PlanSums()
        self._chunks = engine.module
        # verl pads each sequence to a multiple, which ranks share; those of context parallelism in two chunks each
        ranks = mpu.get_context_parallel_world_size()
        self._align = mpu.get_tensor_model_parallel_world_size() * (2 * ranks if ranks > 1 else 1)
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
            with ExitStack() as executions, self._preparing(executions, update), self._replaying(update):
                yield logs
            logs.update(self._ended(update))

    def _ended(self, update: bool) -> dict[str, float]:
        """What plans have to log of a batch that is over."""
        if update:
            self.comparison.metrics.share_native(_over_model)
        if self._planned is not None:
            groups = mpu.get_expert_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
            self._planned.add_to(self._plans, "update" if update else "recompute", *groups)
        return self._plans.flush() if update and self._planning is not None else {}

    def _preparing(self, executions: ExitStack, update: bool) -> AbstractContextManager[Any]:
        """While the context is open, verl's splitting of a batch tells of the micro-batches."""
        return _told(SPLIT, partial(self._prepare, executions, update))

    def _replaying(self, update: bool) -> AbstractContextManager[Any]:
        """While the context is open, verl is given a schedule that replays."""
        return _told(SCHEDULE, partial(self._scheduled, update))

    def _prepare(self, executions: ExitStack, update: bool, found: tuple[Sequence[Any], Any]) -> Any:
        """Read the routes, when verl has split the batch and nothing of it has run."""
        of_each = [np.asarray(data["input_ids"].offsets().diff().cpu().numpy(), np.int64) for data in found[0]]
        longest = max(int(lengths_S.max()) for lengths_S in of_each)
        self._micro_batches = [
            self._micro_batch(data, self._layout(lengths_S, longest), update=update)
            for data, lengths_S in zip(found[0], of_each, strict=True)
        ]
        shards = [each.shard for each in self._micro_batches if each.shard is not None]
        if self._planning is not None and shards:
            # stages run other micro-batches at a time, so that they agree on a plan before the first
            at_once = mpu.get_pipeline_model_parallel_world_size() > 1
            self._planned = PlannedBatch(self.routed, shards, self._planning, executions, at_once=at_once)
        return found

    def _scheduled(self, update: bool, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's schedule for the batch, replayed, and measured as its pass asks for."""

        def run(*, forward_step_func: Step, **given: Any) -> Any:
            if self._replay == "R3":
                self._check_first(schedule, forward_step_func, given)
            if self._planned is not None:
                self._planned.begin(0)
            replaying = self.routed.replaying(forward_step_func, routes_of=self._routes_in, telemetry=update)
            before = self._num_steps

            def step(batches: Iterator[Any], model: Any) -> Any:
                if self._planned is not None and self._num_steps > before:
                    self._planned.begin(self._num_steps - before)
                self._num_steps += 1
                return replaying(batches, model)

            with ExitStack() as stack:
                measures = self.comparison.measures(update=update)
                recording = stack.enter_context(self.routed.record()) if measures else None
                result = schedule(forward_step_func=step, **given)
            self._require_all(self._num_steps - before)
            if recording is not None:
                outputs = [each["model_output"] for each in result] or [{} for _ in self._micro_batches]
                self._measure(recording.trace(), outputs, update=update)
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
        routes = concatenate([each.routes for each in first if each.routes is not None])
        self.check_first(
            routes,
            partial(schedule, forward_step_func=step, **how),
            sequences_of=lambda recorded: recorded.select(np.arange(len(routes))).truncated(routes.lengths),
        )

    def _require_all(self, num_forwards: int) -> None:
        expected = len(self._micro_batches) * len(self._chunks)
        if num_forwards != expected:
            raise ReplayError(
                f"Megatron's schedule ran {num_forwards} forwards of {len(self._micro_batches)} micro-batches on "
                f"{len(self._chunks)} chunks; expected {expected}, each of which is replayed"
            )

    def _measure(self, executed: RoutingTrace, outputs: Sequence[dict[str, Any]], *, update: bool) -> None:
        """Routes of all micro-batches in their order, beside what verl has of each on the last stage."""
        first = 0
        for each, output in zip(self._micro_batches, outputs, strict=True):
            ranges = each.layout.ranges
            mine = executed.select(np.arange(first, first + len(ranges.count_J)))
            first += len(mine)
            mine = mine.truncated(ranges.high_J - ranges.low_J)  # without padding
            if self._replay == "R2" and not update:
                output[FIELD] = routed_experts(mine, each.data)
            routes = each.routes if self._replay == "R3" else None
            self.comparison.add(mine, routes, each.data, output.get("log_probs"), update=update)

    def _layout(self, lengths_S: NDArray[np.int64], longest: int) -> Layout:
        """Where verl puts sequences of these lengths, in a batch of which the longest sequence is so long."""
        if not self._config.use_remove_padding:
            width = longest if self._config.pad_bshd_to_minibatch_max else int(lengths_S.max())
            return pad(lengths_S, side="right", order="sbhd", to=-(-width // self._align) * self._align)
        slots_S = -(-lengths_S // self._align) * self._align
        if self._config.pad_to_length:
            bucket = lcm(self._config.pad_to_length_bucket, mpu.get_context_parallel_world_size())
            slots_S[-1] += -slots_S.sum() % bucket
        return pack(lengths_S, slots=slots_S)

    def _micro_batch(self, data: Any, layout: Layout, *, update: bool) -> RoutedMicroBatch:
        routes = self._routes_of(data, update=update)
        shard = None if routes is None else self.routed.shard(routes, layout, missing="spread")
        return RoutedMicroBatch(data, layout, routes, shard)

    def _routes_in(self, data: Any) -> RouteShard | None:
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
    return over_ranks(over_ranks(sums, mpu.get_model_parallel_group()), mpu.get_context_parallel_group())


def register() -> None:
    """Have verl make this engine for the strategy megatron.

    Raises:
        AttachError: when this release of verl has no longer what replay stands on, or another engine took its place.
    """
    require_overridden("verl", verl.__version__, MegatronRoutingReplay, MegatronEngineWithLMHead)
    take_place(MegatronRoutingReplay, MegatronEngineWithLMHead, "megatron", device=DEVICE)


register()

# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""verl's Megatron engine with foreroute's replay, and with plans: what is overridden, and what runs in its passes.

verl imports this module in every worker when it is told to, and then makes its engines from here:

    actor_rollout_ref.model.external_lib=foreroute.trainers.verl.megatron
    actor_rollout_ref.actor.megatron.router_replay.mode=R3
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True

Routes are replayed by foreroute's hooks in the place of verl's: a plan is executed on the rows of a replay, whose
micro-batch is known in every recomputation too. verl gives Megatron's schedule all micro-batches of a batch in one
call: their routes are read, checked and cut to this rank when it is called, before the first of them runs. That is
when a plan can be made, and all ranks of a model do something together: inside of the call, stages are in different
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
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
from verl.utils.device import get_device_id
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
from foreroute.trainers.verl.packed_batch import PackedBatch, PackedRoutes
from foreroute.trainers.verl.passes import ROLLOUT_LOG_PROBS, EnginePasses
from foreroute.trainers.verl.planning import PlannedBatch, PlanningMegatronConfig
from foreroute.trainers.verl.protocol import FIELD, routed_experts
from foreroute.trainers.verl.registry import replace_engine
from foreroute.trainers.verl.settings import Replay, replay_of, require_supported_by_megatron

DEVICE = "cuda"
"""On others verl has an engine of other makers, which keeps its own replay."""
Step = Callable[[Iterator[Any], Any], Any]
"""verl's `forward_step(batch_iter, model)`, its other parameters bound."""


class MegatronRoutingReplay(MegatronEngineWithLMHead):
    """verl's Megatron engine of language models with routing replay, and plans where its configuration has them.

    An engine that only runs forward is a reference, and is left alone.

    Raises:
        AttachError: for a release of mbridge that does not work.
        ConfigError: for settings under which replay is not supported, and plans without replay.
    """

    replays_routes = executes_plans = True  # what verl's registry is searched for
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
        """Build the model as verl does, and prove replay on it. Raises `AttachError`."""
        super().initialize()
        if self._replay != "disabled":
            with self.eval_mode():
                self.routing = MegatronPasses(self, self._replay)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """Run verl's passes over a batch, of which each micro-batch is replayed."""
        run = partial(super().forward_backward_batch, data, loss_function, forward_only)
        return run() if self.routing is None else self.routing.run_batch(run, data, update=not forward_only)

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """Run verl's training step, with mismatch and plans among its metrics."""
        train = partial(super().train_batch, data, loss_function)
        return train() if self.routing is None else self.routing.train(train)


@dataclass(frozen=True)
class RoutedMicroBatch:
    """One micro-batch of verl, its field of routes taken off."""

    data: Any
    layout: Layout
    packed: PackedBatch  # on the device, where log-probs are
    routes: RoutingTrace | None  # as the host read them in the pass that is compared
    shard: RouteShard | None  # to replay; rows that the rollout did not route are spread


class MegatronPasses(EnginePasses):
    """The passes of one Megatron engine, whose schedule is given all micro-batches of a batch at once."""

    def __init__(self, engine: Any, replay: Replay) -> None:
        super().__init__(engine, megatron.attach(engine.module), replay)
        self._config = config = engine.engine_config
        self._planning = config if isinstance(config, PlanningMegatronConfig) else None
        self._plan_sums = PlanSums()
        self._num_chunks = len(engine.module)
        # verl pads each sequence to a multiple, which ranks share; those of context parallelism in two chunks each
        ranks = mpu.get_context_parallel_world_size()
        self._align = mpu.get_tensor_model_parallel_world_size() * (2 * ranks if ranks > 1 else 1)

    def around(self, *, update: bool) -> AbstractContextManager[object]:
        """Give verl a schedule that replays while the passes of a batch run."""
        find_schedule = transformer_impl.get_forward_backward_func
        replaying = lambda: partial(self._run_schedule, find_schedule(), update=update)  # noqa: E731
        return patch.object(transformer_impl, "get_forward_backward_func", replaying)

    def over_sharing_ranks(self, sums: Tensor) -> Tensor:
        """Add sums up over the ranks of one model, which are all ranks but those of other data."""
        return over_ranks(over_ranks(sums, mpu.get_model_parallel_group()), mpu.get_context_parallel_group())

    def flush_plans(self) -> dict[str, float]:
        """Give what plans did."""
        return self._plan_sums.flush()

    def _run_schedule(
        self, schedule: Callable[..., Any], *, forward_step_func: Step, data_iterator: Any, update: bool, **options: Any
    ) -> Any:
        """Run the micro-batches of a batch as verl asks for it, replayed, and compared as their pass asks for."""
        given = list(data_iterator[0] if isinstance(data_iterator, list) else data_iterator)
        micro_batches = self._read_micro_batches(given, update=update)
        shards = [each.shard for each in micro_batches if each.shard is not None]
        run = partial(self._run_micro_batches, schedule, options)
        if self._replay == "R3" and not self.first_rollout_checked:
            self._check_first(micro_batches, partial(run, forward_step_func, forward_only=True))
        replaying = self.routed.replaying(forward_step_func, routes_of=partial(_find_shard, micro_batches))
        num_before, planned = self._num_steps, None
        with ExitStack() as stack:
            recording = None if shards else stack.enter_context(self.routed.record())
            executions = stack.enter_context(ExitStack())
            if self._planning is not None and shards:
                planned = PlannedBatch(
                    self.routed,
                    shards,
                    self._planning,
                    executions,
                    is_first=mpu.get_expert_model_parallel_rank() == 0,
                    # stages run other micro-batches at a time, so that they agree on a plan before the first
                    waits_for_plan=mpu.get_pipeline_model_parallel_world_size() > 1,
                )

            def step(batches: Iterator[Any], model: Any) -> Any:
                if planned is not None and 0 < planned.num_at_home == self._num_steps - num_before:
                    planned.execute_plan()
                self._num_steps += 1
                return replaying(batches, model)

            results = run(step, micro_batches)
        self._require_all(self._num_steps - num_before, len(micro_batches))
        if planned is not None:
            planned.add_to(self._plan_sums, "update" if update else "recompute")
        outputs = [each["model_output"] for each in results] or [{}] * len(micro_batches)
        if recording is not None:
            self._write_routes(recording.trace(), micro_batches, outputs)
        for each, output in zip(micro_batches, outputs, strict=True):
            self.compare_log_probs(each.packed, each.data, output.get("log_probs"), update=update)
        return results

    def _run_micro_batches(
        self,
        schedule: Callable[..., Any],
        options: dict[str, Any],
        step: Step,
        micro_batches: Sequence[RoutedMicroBatch],
        **others: Any,
    ) -> Any:
        """Run a schedule on some micro-batches, with verl's options but for others."""
        batches = transformer_impl.make_batch_generator([each.data for each in micro_batches], self._num_chunks)
        options = options | {"num_microbatches": len(micro_batches)} | others
        return schedule(forward_step_func=step, data_iterator=batches, **options)

    def _read_micro_batches(self, given: Sequence[Any], *, update: bool) -> list[RoutedMicroBatch]:
        """Read the routes of all micro-batches on the host, before any of them runs."""
        lengths = [np.asarray(data["input_ids"].offsets().diff().cpu().numpy(), np.int64) for data in given]
        longest = max(int(lengths_S.max()) for lengths_S in lengths)
        return [
            self._cut_micro_batch(data, self._lay_out(lengths_S, longest), update=update)
            for data, lengths_S in zip(given, lengths, strict=True)
        ]

    def _cut_micro_batch(self, data: Any, layout: Layout, *, update: bool) -> RoutedMicroBatch:
        """Cut the routes of a micro-batch to this rank, and take the field off, which would go to the device whole."""
        routes = shard = None
        if self.brings_routes(data, update=update):
            if self.at_rollout_weights(update=update):
                trace = routes = self.decode(data)
            else:
                trace = PackedRoutes(PackedBatch(data), self.routed.spec, partial(self.decode, data)).trace()
            shard = self.routed.shard(trace, layout, missing="spread")
        of_responses = ("input_ids", "responses", "attention_mask", "response_mask", ROLLOUT_LOG_PROBS)
        there = data.select(*(name for name in of_responses if name in data.keys())).to(get_device_id())  # noqa: SIM118
        rest = data.exclude(FIELD)
        return RoutedMicroBatch(rest, layout, PackedBatch(there), routes, shard)

    def _check_first(self, micro_batches: Sequence[RoutedMicroBatch], run: Callable[..., Any]) -> None:
        """Hold the first routes of the rollout against the model's own."""
        # virtual stages take as many micro-batches at a time as there are stages
        num_first = mpu.get_pipeline_model_parallel_world_size() if self._num_chunks > 1 else 1
        first = micro_batches[:num_first]
        routes = concatenate([each.routes for each in first if each.routes is not None])
        self.check_first(
            routes,
            partial(run, first),
            sequences_of=lambda recorded: recorded.select(np.arange(len(routes))).truncated(routes.lengths),
        )

    def _require_all(self, num_forwards: int, num_micro_batches: int) -> None:
        expected = num_micro_batches * self._num_chunks
        if num_forwards != expected:
            raise ReplayError(
                f"Megatron's schedule ran {num_forwards} forwards of {num_micro_batches} micro-batches on "
                f"{self._num_chunks} chunks; expected {expected}, each of which is replayed"
            )

    def _write_routes(
        self, executed: RoutingTrace, micro_batches: Sequence[RoutedMicroBatch], outputs: Sequence[dict[str, Any]]
    ) -> None:
        """Put recorded routes among the outputs of their micro-batch, for updates to replay."""
        first = 0
        for each, output in zip(micro_batches, outputs, strict=True):
            ranges = each.layout.ranges
            own = executed.select(np.arange(first, first + len(ranges.count_J)))
            first += len(own)
            output[FIELD] = routed_experts(own.truncated(ranges.high_J - ranges.low_J), each.data)  # without padding

    def _lay_out(self, lengths_S: NDArray[np.int64], longest: int) -> Layout:
        """Lay sequences of these lengths out as verl does, in a batch of which the longest sequence is so long."""
        if not self._config.use_remove_padding:
            width = longest if self._config.pad_bshd_to_minibatch_max else int(lengths_S.max())
            return pad(lengths_S, side="right", order="sbhd", to=-(-width // self._align) * self._align)
        slots_S = -(-lengths_S // self._align) * self._align
        if self._config.pad_to_length:
            bucket = lcm(self._config.pad_to_length_bucket, mpu.get_context_parallel_world_size())
            slots_S[-1] += -slots_S.sum() % bucket
        return pack(lengths_S, slots=slots_S)


def _find_shard(micro_batches: Sequence[RoutedMicroBatch], data: Any) -> RouteShard | None:
    for each in micro_batches:
        if data is each.data:
            return each.shard
    raise ReplayError("Megatron's schedule runs other micro-batches than verl split the batch into")


def register() -> None:
    """Have verl make this engine for the strategy megatron."""
    require_overridden("verl", verl.__version__, MegatronRoutingReplay, MegatronEngineWithLMHead)
    replace_engine(MegatronRoutingReplay, MegatronEngineWithLMHead, "megatron", device=DEVICE)


register()

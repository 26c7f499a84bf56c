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

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any
from unittest.mock import patch

from foreroute.adapters.versions import require_peers

require_peers("torch", "megatron-core", "verl")

import numpy as np
import torch.distributed as dist
import verl
from megatron.core import parallel_state as mpu
from numpy.typing import NDArray
from torch import Tensor
from verl.utils.device import get_device_id
from verl.utils.megatron_utils import unwrap_model
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.config import EngineRouterReplayConfig
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from foreroute.adapters import megatron
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.errors import ReplayError
from foreroute.layout import Layout, pack, pad
from foreroute.trace import RoutingTrace, concatenate
from foreroute.trainers.checks import check_first_rollout, refuse, require_overridden
from foreroute.trainers.plans import PlannedPasses
from foreroute.trainers.verl.packed_batch import FIELD, PackedBatch, PackedRoutes
from foreroute.trainers.verl.passes import ROLLOUT_LOG_PROBS, EnginePasses, ReplayingEngine, scores_on_masks, scoring
from foreroute.trainers.verl.planning import PlanningMegatronConfig
from foreroute.trainers.verl.protocol import routed_experts
from foreroute.trainers.verl.registry import replace_engine
from foreroute.trainers.verl.regrouping import regroup
from foreroute.trainers.verl.settings import (
    FIXED_MICRO_BATCHES,
    Replay,
    replay_of,
    require_regroupable,
    require_supported_by_megatron,
)

LOG = logging.getLogger(__name__)
DEVICE = "cuda"
"""On others verl has an engine of other makers, which keeps its own replay."""
Step = Callable[[Iterator[Any], Any], Any]
"""verl's `forward_step(batch_iter, model)`, its other parameters bound."""


class MegatronRoutingReplay(ReplayingEngine, MegatronEngineWithLMHead):
    """verl's Megatron engine of language models with routing replay, and plans where its configuration has them.

    An engine that only runs forward is a reference, and is left alone.

    Raises:
        AttachError: for a release of mbridge that does not work.
        ConfigError: for settings under which replay is not supported, and plans without replay.
    """

    executes_plans = True  # what verl's registry is searched for
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
            if (named := self.routing.routed.native_routers) and not dist.get_rank():
                LOG.warning("routers beside the decoder route natively, at home, under replay: %s", ", ".join(named))

    def forward_step(self, batch_iter: Iterator[Any], model: Any, **functions: Any) -> Any:
        """Run verl's pass over a micro-batch, on its sets."""
        if not (scores_on_masks(self) and unwrap_model(model).post_process):
            return super().forward_step(batch_iter, model, **functions)
        data = next(batch_iter)
        lengths_S = data["input_ids"].offsets().diff().cpu().numpy()
        rows_of = partial(_rows_here, lengths_S, is_packed=self.engine_config.use_remove_padding)
        name, group = "vocab_parallel_log_probs_from_logits", mpu.get_tensor_model_parallel_group()
        with scoring(self, transformer_impl, name, data, rows_of, group):
            return super().forward_step(iter([data]), model, **functions)


class MegatronPasses(EnginePasses):
    """The passes of one Megatron engine, whose schedule is given all micro-batches of a batch at once."""

    def __init__(self, engine: Any, replay: Replay) -> None:
        # all ranks but those of other data
        of_one_model = (mpu.get_model_parallel_group(), mpu.get_context_parallel_group())
        super().__init__(engine, megatron.attach(engine.module), replay, sharing_groups=of_one_model)
        self._config = config = engine.engine_config
        if isinstance(config, PlanningMegatronConfig):
            self._planned = PlannedPasses(self.routed, *config.planned_for(int(self.routed.home_LE.max()) + 1))
        self._packs_by_routes = getattr(config, "packing", "length") == "routes"
        if self._packs_by_routes:
            require_regroupable(engine.tf_config)
        self._traces: list[RoutingTrace] = []  # those that packing has read
        self._num_chunks = len(engine.module)

    @contextmanager
    def batch(self, data: Any, *, update: bool) -> Iterator[None]:
        """Give verl a schedule that replays while the passes of a batch run. See `EnginePasses`."""
        schedule = partial(self._run_schedule, transformer_impl.get_forward_backward_func())
        prepare = partial(self._prepare, transformer_impl.prepare_micro_batches)
        with (
            patch.object(transformer_impl, "prepare_micro_batches", prepare),
            patch.object(transformer_impl, "get_forward_backward_func", lambda: schedule),
            super().batch(data, update=update),
        ):
            yield

    def _prepare(self, prepare: Callable[..., Any], *, data: Any, **options: Any) -> tuple[Any, Any]:
        """Split a batch as verl does, and exchange sequences of micro-batches where their packing is by routes."""
        batches, indices = prepare(data=data, **options)
        self._traces = []
        if not (self._packs_by_routes and self._has_routes):
            return batches, indices
        grouped = get_non_tensor_data(data, "force_group_size", default=1)
        refuse(
            "packing is routes, and",
            [
                (indices is None, FIXED_MICRO_BATCHES),
                (grouped > 1, f"force_group_size is {grouped}: groups stay whole; take the packing length"),
            ],
        )
        packed = regroup(self.routed, data, batches, indices, self._read_routes, mpu.get_data_parallel_rank())
        self._traces = packed.traces
        return packed.batches, packed.indices

    def _run_schedule(
        self, schedule: Callable[..., Any], *, forward_step_func: Step, data_iterator: Any, **options: Any
    ) -> Any:
        """Run the micro-batches of a batch as verl asks for it, replayed, and compared as their pass asks for."""
        given = list(data_iterator[0] if isinstance(data_iterator, list) else data_iterator)
        layouts = self._lay_out(given)
        # all routes are read, checked and cut on the host before any micro-batch runs
        traces, self._traces = self._traces, []
        if self._has_routes and not traces:
            traces = [self._read_routes(data) for data in given]
        shards = [
            self.routed.shard(trace, layout, missing="spread")
            for trace, layout in zip(traces, layouts, strict=self._has_routes)
        ]
        packed = [_pack_responses(data) for data in given] if self._is_compared else []
        micro_batches = [data.exclude(FIELD) for data in given]  # the field would go to the device whole

        def run(step: Step, num: int, **others: Any) -> Any:
            batches = transformer_impl.make_batch_generator(micro_batches[:num], self._num_chunks)
            settings = options | {"num_microbatches": num} | others
            return schedule(forward_step_func=step, data_iterator=batches, **settings)

        if traces and not self.first_rollout_checked:
            # virtual stages take as many micro-batches at a time as there are stages
            stages = mpu.get_pipeline_model_parallel_world_size() if self._num_chunks > 1 else 1
            num_first = min(stages, len(given))
            first = concatenate(traces[:num_first])
            check_first_rollout(
                self.routed,
                first,
                partial(run, forward_step_func, num_first, forward_only=True),
                sequences_of=lambda recorded: recorded.select(np.arange(len(first))).truncated(first.lengths),
            )
            self.first_rollout_checked = True
        shards_by_id: dict[int, RouteShard | None]
        shards_by_id = dict(zip(map(id, micro_batches), shards or [None] * len(given), strict=True))

        def routes_of(data: Any) -> RouteShard | None:
            if id(data) not in shards_by_id:
                raise ReplayError(
                    "Megatron's schedule runs another micro-batch than those that verl split the batch into; expected "
                    "those alone, whose routes are known. Hand verl's micro-batches on as they are"
                )
            return shards_by_id[id(data)]

        replaying = self.routed.replaying(forward_step_func, routes_of=routes_of)
        watching = None
        if self._sentinel is not None and traces and not self._is_update:
            watching = self._sentinel.counting(np.concatenate([each.lengths for each in traces]))
        # stages of a pipeline run other micro-batches at a time, so that they agree on a plan before the first
        num_at_home = 0 if mpu.get_pipeline_model_parallel_world_size() > 1 else min(1, len(given) - 1)
        execute_plan: Callable[[], None] | None = None

        def step(batches: Iterator[Any], model: Any) -> Any:
            if execute_plan is not None and 0 < num_at_home == self.num_forwards:
                execute_plan()
            self.num_forwards += 1
            return replaying(batches, model)

        with nullcontext() if shards else self.routed.record() as recording, ExitStack() as opened:
            if self._planned is not None and shards:
                planning = self._planned.executing(
                    shards,
                    "update" if self._is_update else "recompute",
                    num_at_home=num_at_home,
                    is_first=mpu.get_expert_model_parallel_rank() == 0,
                )
                execute_plan = opened.enter_context(planning)
            with nullcontext() if watching is None else watching:
                results = run(step, len(given))
        self._require_all(len(given))  # behind calls that the ranks make together
        outputs = [each["model_output"] for each in results] or [{}] * len(given)
        if recording is not None:
            _write_routes(recording.trace(), layouts, micro_batches, outputs)
        for each, data, output in zip(packed, micro_batches, outputs, strict=self._is_compared):
            self.compare_log_probs(each, data, output.get("log_probs"))
        return results

    def _read_routes(self, data: Any) -> RoutingTrace:
        """Read the routes of a micro-batch: with every check once, afterwards as a device checks them elsewhere."""
        if self._is_compared:
            return self.decode(data)
        return PackedRoutes(PackedBatch(data), self.routed.spec, partial(self.decode, data)).trace()

    def _require_all(self, num_micro_batches: int) -> None:
        expected = num_micro_batches * self._num_chunks
        if self.num_forwards != expected:
            raise ReplayError(
                f"Megatron's schedule ran {self.num_forwards} forwards of {num_micro_batches} micro-batches on "
                f"{self._num_chunks} chunks; expected {expected}, each of which is replayed"
            )

    def _lay_out(self, micro_batches: Sequence[Any]) -> list[Layout]:
        """Lay the sequences of micro-batches out as verl does."""
        lengths = [np.asarray(data["input_ids"].offsets().diff().cpu().numpy(), np.int64) for data in micro_batches]
        longest = max(int(lengths_S.max()) for lengths_S in lengths)
        return [self._lay_out_micro_batch(lengths_S, longest) for lengths_S in lengths]

    def _lay_out_micro_batch(self, lengths_S: NDArray[np.int64], longest: int) -> Layout:
        config = self._config
        if not config.use_remove_padding:
            width = _round_up_to_ranks(np.array(longest if config.pad_bshd_to_minibatch_max else lengths_S.max()))
        else:
            width = _round_up_to_ranks(lengths_S).sum()
            if config.pad_to_length:
                width += -width % lcm(config.pad_to_length_bucket, mpu.get_context_parallel_world_size())
        return lay_out(lengths_S, int(width), is_packed=config.use_remove_padding)


def lay_out(lengths_S: NDArray[np.int64], width: int, *, is_packed: bool) -> Layout:
    """Lay the sequences of a micro-batch out as verl does, in a number of positions: of all together, or of each."""
    if not is_packed:
        return pad(lengths_S, side="right", order="sbhd", to=width)
    padded_S = _round_up_to_ranks(lengths_S)
    padded_S[-1] += width - padded_S.sum()  # what fills up the whole goes to the last sequence
    return pack(lengths_S, padded_lengths=padded_S)


def _rows_here(lengths_S: NDArray[np.int64], labels_BT: Tensor, *, is_packed: bool) -> NDArray[np.integer]:
    """Find the row of the batch without padding at each place that this rank has a label for, -1 for padding."""
    num_ranks, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    layout = lay_out(lengths_S, labels_BT.shape[1] * num_ranks, is_packed=is_packed)
    rows: NDArray[np.integer] = layout.split_context(num_ranks, rank).rows().packed_row_R
    return rows.reshape(-1, len(labels_BT)).T.reshape(-1)


def _round_up_to_ranks(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round up to the multiple that verl pads sequences to, so that ranks share them evenly."""
    ranks = mpu.get_context_parallel_world_size()
    multiple = mpu.get_tensor_model_parallel_world_size() * (2 * ranks if ranks > 1 else 1)
    rounded: NDArray[np.int64] = -(-lengths // multiple) * multiple
    return rounded


def _pack_responses(data: Any) -> PackedBatch:
    """Put what tells where responses are on the device, where log-probs are."""
    of_responses = ("input_ids", "responses", "attention_mask", "response_mask", ROLLOUT_LOG_PROBS)
    return PackedBatch(data.select(*(name for name in of_responses if name in data.keys())).to(get_device_id()))  # noqa: SIM118


def _write_routes(
    executed: RoutingTrace, layouts: Sequence[Layout], micro_batches: Sequence[Any], outputs: Sequence[dict[str, Any]]
) -> None:
    """Put recorded routes among the outputs of their micro-batch, for updates to replay."""
    first = 0
    for layout, data, output in zip(layouts, micro_batches, outputs, strict=True):
        own = executed.select(np.arange(first, first + len(layout.length_S)))
        first += len(own)
        output[FIELD] = routed_experts(own.truncated(layout.length_S), data)  # without padding


def register() -> None:
    """Have verl make this engine for the strategy megatron."""
    require_overridden("verl", verl.__version__, MegatronRoutingReplay, MegatronEngineWithLMHead)
    replace_engine(MegatronRoutingReplay, MegatronEngineWithLMHead, "megatron", device=DEVICE)


register()

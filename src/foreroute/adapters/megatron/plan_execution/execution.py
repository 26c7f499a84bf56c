"""A plan in force: which of its cells a layer runs now, and what all ranks have agreed on before it does.

The micro-step of a pass belongs to its routes (`ReplayRows.micro_step`). A recomputation runs on the input of its own
pass, and nodes of autograd keep their cell. So a fetch is bound to (step, micro-step, layer), whatever ran last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.adapters.megatron.plan_execution.experts import home_parameters
from foreroute.adapters.megatron.plan_execution.layer import CellWork, PlannedLayer, objection_to_layer
from foreroute.adapters.megatron.plan_execution.replicas import SeparateReplicas
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.core.passes import Pass, PassStack
from foreroute.ep.agreement import (
    objection_to_counts,
    objection_to_micro_batches,
    objection_to_number,
    objection_to_plan,
    raise_alike,
)
from foreroute.ep.dispatch import CellRows, gather_counts, rows_on
from foreroute.ep.transfer import Cell
from foreroute.ep.transfer.consensus import RankConsensus, agree_on_plan, plan_digest
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions, TransferRecord
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.replica_weights import Home
from foreroute.errors import CountsError, PlacementError, PlanError, ReplayError, TraceError
from foreroute.plan import CellSchedule, ExecutionSchedule, StepPlan
from foreroute.replay import ReplayRows
from foreroute.trace import RoutedLayer, RoutingSpec


class ExecutionRanks:
    """The expert-parallel ranks of this pipeline stage, as they agree and as they send weights. Made together.

    Args:
        ep_group: Megatron's.
        pp_group: Megatron's, of this rank's peers in the other stages; None for one stage.
        options: how weights of replicas travel.

    Attributes:
        group: Megatron's, of rows.
        consensus: of them.
        options: the same.
    """

    def __init__(self, ep_group: Any, pp_group: Any, options: TransferOptions) -> None:
        self.group = ep_group
        self.consensus = RankConsensus(ep_group, member="expert-parallel rank")
        self.options = options
        self._engine: TransferEngine | None = None
        staged = pp_group is not None and pp_group.size() > 1
        self._stages = RankConsensus(pp_group, member="pipeline stage") if staged else None

    def engine(self, homes: Mapping[int, Home]) -> TransferEngine:
        """What moves weights of replicas, made for the layers of this stage when they are first executed.

        A collective call of the expert-parallel ranks.
        """
        if self._engine is None:
            # with overlap_param_gather, Megatron gathers the weights of a layer as it runs
            peers = PeerGroup(self.group, timeout_s=self.options.timeout_s)
            self._engine = TransferEngine(homes, self.options, peers, gathers_late=True)
        return self._engine

    def close(self) -> None:
        """Give back what weights travel by."""
        if self._engine is not None:
            self._engine.close()

    def raise_alike(self, error: type[Exception], mine: str | None, what: str) -> None:
        """Raise on every rank of the group and of its other stages, when one of them objects.

        A collective call of all stages: not for what happens inside a schedule, where each is elsewhere.
        """
        if self._stages is not None:
            # the other ranks of the group hear of it below, and through them their own stages
            mine = "; ".join(self._stages.objections(mine, what)) or None
        raise_alike(self.consensus, error, mine, what)

    def agree_on_plan(self, step: int, plan: StepPlan, what: str) -> None:
        """Make sure that all ranks of the group, and of its other stages, are about to execute the same plan.

        Raises:
            PlanError: on every rank alike, when plans or steps differ, or the plan is for other ranks.
        """
        if self._stages is not None:
            digests = self._stages.texts(plan_digest(plan), what)
            mine = None
            if len(set(digests)) > 1:
                listed = "; ".join(f"stage {stage}: plan {digest}" for stage, digest in enumerate(digests))
                mine = (
                    f"pipeline stages hold different plans ({listed}); every stage must be given the plan of all layers"
                )
            # the other ranks of the group may be in pipelines that agree
            raise_alike(self.consensus, PlanError, mine, what)
        agree_on_plan(self.consensus, step, plan, "megatron")

    def gather_counts(self, micro_batches: Sequence[RouteShard]) -> NDArray[np.int32]:
        """int32 [M, L, G, E], assignments of every rank in the L layers of this stage.

        Raises:
            TraceError: on every rank alike, when one hands in what `shard` did not make.
            CountsError: on every rank alike, when ranks have other numbers of micro-batches.
        """
        what = "gathering counts"
        self.raise_alike(TraceError, _objection_to_shards(micro_batches), what)
        counts_MLE = np.array([shard.counts_LE for shard in micro_batches], np.int32)
        texts = self.consensus.texts(f"{len(micro_batches)} micro-batches", what)
        if len(set(texts)) > 1 or not micro_batches:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise CountsError(
                f"ranks have other micro-batches than can be planned ({listed}); expected as many on each"
            )
        counts_GMLE = self.consensus.gather(torch.from_numpy(counts_MLE), what).numpy()
        return np.moveaxis(counts_GMLE, 0, 2)


class PlanExecution:
    """What `RoutedMegatron.execute` yields. Making one is a collective call of the expert-parallel ranks.

    Args:
        ranks: of this stage.
        step: other than that of every execution before.
        plan: the same on all of them.
        counts_MLGE: integers [M, L, G, E], that the plan was made for.
        micro_batches: of this rank.
        spec: of the whole model.
        stage: per chunk, the routers of this rank and the passes that they run in.
        home_LE: int16 [L, E], where experts live.

    Attributes:
        plan: the plan.
        executed_ML: int64 [M, L], assignments that the experts of this rank have computed, recomputation left out;
            layers of other stages have none.
        transfers: what travelled here for replicas, once the execution is over.

    Raises:
        PlanError: on every rank alike, when plans differ, or one is for other ranks, layers, experts or homes.
        CountsError: on every rank alike, when the plan was made for other counts, or a micro-batch has others.
        PlacementError: on every rank alike, when a layer cannot execute a plan.
    """

    def __init__(
        self,
        ranks: ExecutionRanks,
        step: int,
        plan: StepPlan,
        counts_MLGE: NDArray[np.integer],
        micro_batches: Sequence[RouteShard],
        spec: RoutingSpec,
        stage: Sequence[tuple[Sequence[ChunkRouter], PassStack]],
        home_LE: NDArray[np.int16],
    ) -> None:
        self.plan = plan
        self._num_replicas_ML = plan.num_replicas_ML
        self.executed_ML = np.zeros(plan.shape[:2], np.int64)
        self._ranks, self._step, self._shards = ranks, step, list(micro_batches)
        self._counts_MLGE = counts_MLGE
        # chunks without routers take no part
        self._begun = {chunk: 0 for chunk, (sites, _) in enumerate(stage) if sites}
        consensus = ranks.consensus
        what = f"agreeing on the plan of step {step}"
        ranks.agree_on_plan(step, plan, what)
        ranks.raise_alike(PlacementError, _objection_to_layers(stage), what)
        ranks.raise_alike(CountsError, objection_to_number(len(self._shards), plan.shape[0]), what)
        ranks.raise_alike(PlanError, objection_to_plan(plan, home_LE), what)
        ranks.raise_alike(TraceError, _objection_to_shards(self._shards), what)
        layers = [spec.layers.index(site.layer) for sites, _ in stage for site in sites]
        mine = objection_to_counts(plan, counts_MLGE) or objection_to_micro_batches(
            [shard.counts_LE for shard in self._shards], counts_MLGE[:, layers, consensus.rank], layers
        )
        ranks.raise_alike(CountsError, mine, what)
        partly = torch.tensor([not shard.is_whole for shard in self._shards], dtype=torch.int32)
        self._known_M = [not any_ for any_ in consensus.most(partly, what).tolist()]
        self._schedule = ExecutionSchedule(plan, counts_MLGE, consensus.rank, paths=ranks.options.paths)
        self._group = ranks.group
        # by pass, for as long as something of it may run again
        self._rows: WeakKeyDictionary[Pass, dict[int, CellRows]] = WeakKeyDictionary()
        self._routed: dict[Cell, Tensor] = {}
        self._layers = []
        for sites, passes in stage:
            of_chunk = [spec.layers.index(site.layer) for site in sites]
            self._layers += [
                PlannedLayer(site, ranks.group, self._begin(site, layer, passes, of_chunk))
                for site, layer in zip(sites, of_chunk, strict=True)
            ]
        self._home = {spec.layers.index(s.layer): home_parameters(s) for sites, _ in stage for s in sites}
        self._engine = ranks.engine(self._home) if self._home else None
        self._has_begun = False
        self.transfers: list[TransferRecord] = []

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Have the layers execute it while the context is open. Leaving it is a collective call.

        Raises:
            ReplayError: on every rank alike, when a micro-step was not run, or a router did not do what was replayed.
        """
        with ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(layer.in_place())
            yield
        if self._engine is not None:
            self._engine.end_step()
            self.transfers = self._engine.take_records()
        fewest = min(self._begun.values(), default=len(self._shards))
        objection = objection_to_number(fewest, len(self._shards)) or self._misrouted()
        self._ranks.raise_alike(ReplayError, objection, f"ending step {self._step}")

    def begin_pass(self, chunk: int, shard: RouteShard) -> int:
        """A chunk begins its next forward, on these routes. Asks no other rank. Returns the micro-step.

        Raises:
            CountsError: when these routes are not the ones that were planned. Where other ranks go on, they end with
                this one, at the latest within the timeout of their group.
        """
        micro_step = self._begun[chunk]
        if micro_step == len(self._shards):
            raise CountsError(f"a forward begins after all {micro_step} planned micro-batches; plan as many as are run")
        if shard is not self._shards[micro_step]:
            raise CountsError(
                f"micro-batch {micro_step} brings other routes than were planned; put what was given to execute() into "
                "the batches, in the same order"
            )
        self._begun[chunk] += 1
        return micro_step

    def _begin(
        self, site: ChunkRouter, layer: int, passes: PassStack, of_chunk: Sequence[int]
    ) -> Callable[[], CellWork]:
        fuses_gradients = bool(site.block.experts.config.gradient_accumulation_fusion)

        def begin() -> CellWork:
            micro_step = _micro_step(passes, site)
            cell = Cell(self._step, micro_step, layer)
            rows = self._rows_of(passes.top, micro_step, of_chunk)[layer] if self._known_M[micro_step] else None
            moves = self._schedule.cell(micro_step, layer) if self._num_replicas_ML[micro_step, layer] else None
            replicas = SeparateReplicas(
                cell,
                self._engine_of(passes),
                self._home[layer],
                moves,
                fuses_gradients=fuses_gradients,
            )
            return CellWork(rows, partial(self._exchanged, cell), replicas, partial(self._note, cell, passes.is_again))

        return begin

    def _rows_of(self, current: Pass, micro_step: int, layers: Sequence[int]) -> dict[int, CellRows]:
        """The rows of all cells of a pass: uploaded once, for its recomputation and backward too."""
        if current not in self._rows:
            cells = [self._schedule.cell(micro_step, layer) for layer in layers]
            assert current.rows is not None, "it is replayed"
            self._rows[current] = dict(zip(layers, rows_on(current.rows.ids_LRK.device, cells), strict=True))
        return self._rows[current]

    def _exchanged(self, cell: Cell, counts_E: Tensor) -> CellRows:
        """The rows of a cell in which some rank has rows without a route, which the plan has not counted."""
        counts_GE = gather_counts(self._group, counts_E, str(cell))
        plan = self.plan.cell(cell.micro_step, cell.layer)
        found = CellSchedule.of(plan, counts_GE, self._ranks.consensus.rank, what=str(cell))
        (rows,) = rows_on(counts_E.device, [found])
        return rows

    def _engine_of(self, passes: PassStack) -> TransferEngine:
        assert self._engine is not None, "there is a layer that runs"
        if not self._has_begun:
            if self._engine.paths == "host":
                # all weights are copied now
                for layer in self._layers:
                    layer.finish_gathering()
            # what comes next depends on whether a backward follows, which the first pass tells
            self._engine.begin_step(self._step, self.plan, self._schedule, updating=passes.top.with_grad)
            self._has_begun = True
        return self._engine

    def _note(self, cell: Cell, is_recompute: bool, num_rows: int, counts_E: Tensor) -> None:
        if is_recompute:
            return
        self.executed_ML[cell.micro_step, cell.layer] += num_rows
        if self._known_M[cell.micro_step]:
            self._routed[cell] = counts_E

    def _misrouted(self) -> str | None:
        """Which router did not do what was known ahead, in words, or None. Waits for the device."""
        if not self._routed:
            return None
        for cell, found_E in zip(self._routed, torch.stack(list(self._routed.values())).cpu().numpy(), strict=True):
            planned_E = self._counts_MLGE[cell.micro_step, cell.layer, self._ranks.consensus.rank]
            if (found_E != planned_E).any():
                expert = int((found_E != planned_E).argmax())
                return (
                    f"{cell}: the router made {found_E[expert]} assignments to expert {expert}, {planned_E[expert]} "
                    "were planned and replayed, so rows went astray"
                )
        return None


def whole_counts(
    counts_MLGE: NDArray[np.int32], layers: Sequence[RoutedLayer], spec: RoutingSpec, pp_group: Any
) -> NDArray[np.int32]:
    """Put the layers of all pipeline stages together. A collective call of them.

    Args:
        counts_MLGE: int32 [M, L here, G, E]; G may be 0 where there is no layer.
        layers: of this stage.
        spec: of the whole model.
        pp_group: Megatron's; None for one stage.

    Returns:
        int32 [M, L, G, E].

    Raises:
        CountsError: on all of them alike, when stages have other numbers of micro-batches.
    """
    stages: list[Any] = [(tuple(layers), counts_MLGE)]
    if pp_group is not None and pp_group.size() > 1:
        stages = [None] * pp_group.size()
        dist.all_gather_object(stages, (tuple(layers), counts_MLGE), group=pp_group)
    numbers = [len(counts) for _, counts in stages]
    if len(set(numbers)) > 1:
        raise CountsError(f"pipeline stages have {numbers} micro-batches; expected the same ones on each")
    columns: Mapping[RoutedLayer, NDArray[np.int32]] = {
        layer: counts[:, i] for of_stage, counts in stages for i, layer in enumerate(of_stage)
    }
    return np.stack([columns[layer] for layer in spec.layers], axis=1)


def _micro_step(passes: PassStack, site: ChunkRouter) -> int:
    """That of the pass that runs."""
    rows = None if passes.top is None else passes.top.rows
    if not isinstance(rows, ReplayRows) or rows.micro_step is None:
        raise ReplayError(
            f"the layer of {site.path} runs under a plan, and outside of a replay of planned routes; call the schedule "
            "with routed.replaying(forward_step), and bring the routes that were given to execute() in every batch"
        )
    return rows.micro_step


def _objection_to_shards(micro_batches: Sequence[object]) -> str | None:
    for number, each in enumerate(micro_batches):
        if not isinstance(each, RouteShard):
            return f"micro-batch {number} is a {type(each).__name__}; expected what routed.shard(trace, layout) makes"
    return None


def _objection_to_layers(stage: Sequence[tuple[Sequence[ChunkRouter], PassStack]]) -> str | None:
    for site in (site for sites, _ in stage for site in sites):
        if reason := objection_to_layer(site):
            return f"the layer of {site.path} cannot execute a plan: {reason}"
    return None

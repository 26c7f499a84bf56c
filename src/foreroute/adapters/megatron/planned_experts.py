"""Plans on a Megatron-Core model: its expert-parallel ranks and pipeline stages, its layers, and its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import nn

from foreroute.adapters.megatron.expert_parameters import chained, inspect_experts
from foreroute.adapters.megatron.flex_kernels import is_flex, places_of_rank
from foreroute.adapters.megatron.home_placement import OptimizerCheckpoint, guard_shards, moved_experts, set_home
from foreroute.adapters.megatron.hooks import ChunkHooks
from foreroute.adapters.megatron.planned_layer import PlannedLayer, objection_to_layer
from foreroute.adapters.megatron.separate_replicas import RunReplicas, home_parameters, replica_runner
from foreroute.ep import ExpertParallelModel
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.cells import Home
from foreroute.ep.transfer.home_moves import WHAT, MovingRanks, agree_on_homes, move_layers
from foreroute.ep.transfer.peers import PeerGroup, gather_objects
from foreroute.ep.transfer.segments import shard_moves
from foreroute.errors import PlanError
from foreroute.layout.rank_rows import block_homes
from foreroute.plan import StepPlan
from foreroute.plan.capabilities import Executor
from foreroute.trace import RoutingSpec


class PlannedExperts(ExpertParallelModel):
    """The experts that this rank has of a model that Megatron spreads, in chunks of its pipeline stage."""

    executor: Executor = "megatron"
    gathers_late = True  # with overlap_param_gather, Megatron gathers the weights of a layer as it runs

    def __init__(self, spec: RoutingSpec, chunks: Sequence[ChunkHooks], ep_size: int) -> None:
        trunk: Any = chunks[0].trunk
        self._chunks = chunks
        self._groups = trunk.pg_collection
        self._sites = [(spec.layers.index(site.layer), site, chunk) for chunk in chunks for site in chunk.sites]
        block_E = block_homes(spec.num_experts, ep_size).astype(np.int16)
        ep_group: Any = self._sites[0][1].block.ep_group if self._sites else self._groups.ep
        of_chunks = [[spec.layers.index(layer) for layer in chunk.layers] for chunk in chunks]
        super().__init__(ep_group, np.tile(block_E, (spec.num_layers, 1)), of_chunks)
        # alike in all layers, of which a stage may have none
        self._flex = [site.block.token_dispatcher for _, site, _ in self._sites if is_flex(site.block.token_dispatcher)]
        if self._flex:
            self.executor = "megatron_flex"
        self._of_job: RankConsensus | None = None
        self._moving_ranks: MovingRanks | None = None
        self._guarded: WeakSet[Any] = WeakSet()  # optimizers whose checkpoints follow their experts
        self._layers_in_execution: list[PlannedLayer] = []
        # by position in the model; they keep modules of Transformer Engine from one execution to the next
        self._replica_runners: dict[int, RunReplicas] = {}

    def make_everyone(self) -> RankConsensus | None:
        """The ranks of all pipeline stages that run the same micro-batches."""
        pp_group = self._groups.pp
        if pp_group is None or pp_group.size() == 1:
            return None
        of_stages = gather_objects(dist.get_process_group_ranks(self._group), pp_group, "joining pipeline stages")
        return RankConsensus(pp_group, self._group, ranks=sorted(rank for each in of_stages for rank in each))

    def require_executable(self, plan: StepPlan) -> None:
        # of any plan, also one without replicas: a layer sends rows by it in place of Megatron
        for _, site, _ in self._sites:
            if reason := objection_to_layer(site):
                raise PlanError(f"the layer of {site.path} cannot execute a plan: {reason}")

    def places_of_rank(self, plan: StepPlan) -> int | None:
        if not self._flex:
            return None
        num_home = plan.shape[2] // plan.topology.num_ranks
        return places_of_rank(self._flex[0], num_home, plan.topology.redundant_slots)

    def load(self) -> Mapping[int, Home]:
        homes = {number: home_parameters(site) for number, site, _ in self._sites}
        for number, site, _ in self._sites:
            if number not in self._replica_runners:
                self._replica_runners[number] = replica_runner(site.block.experts)
        self._layers_in_execution = [
            PlannedLayer(site, number, homes[number], self._replica_runners[number], self._group, chunk.passes)
            for number, site, chunk in self._sites
        ]
        return homes

    def _is_executing(self) -> bool:
        return not _executed.isdisjoint(chunk.trunk for chunk in self._chunks)

    @contextmanager
    def layers_in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._layers_in_execution.clear)
            # of every attachment, also where a stage has no layer that executes anything
            for chunk in self._chunks:
                _executed.add(chunk.trunk)
                stack.callback(_executed.discard, chunk.trunk)
            for layer in self._layers_in_execution:
                stack.enter_context(layer.in_place())
            try:
                yield
            except BaseException:
                # DeepEP's kernels count into one place, which the host reads in a dispatch without a budget: what an
                # aborted step has launched must not write there then
                if self._flex and torch.cuda.is_available():
                    torch.cuda.synchronize()
                raise

    def finish_gathering(self) -> None:
        for layer in self._layers_in_execution:
            layer.finish_gathering()

    def move(self, home_LE: ArrayLike, optimizer: Any) -> tuple[int, NDArray[np.int16]]:
        # expert-data-parallel ranks, which are in no group of ours, move the same experts
        if self._of_job is None:
            everyone = self.groups.everyone
            self._of_job = everyone if everyone.size == dist.get_world_size() else RankConsensus()
        num_ranks = self.groups.consensus.size
        after_LE = agree_on_homes(self._of_job, self.home_LE, home_LE, num_ranks, self._objection_to_moves())
        moved = [(row, site) for row, site, _ in self._sites if (self.home_LE[row] != after_LE[row]).any()]
        if moved and self._moving_ranks is None:
            self._moving_ranks = self._make_moving_ranks()
        # other pipeline stages may move theirs, and this rank votes with them
        received = move_layers(
            self._of_job,
            self._moving_ranks if moved else None,
            [shard_moves(self.home_LE[row], after_LE[row]) for row, _ in moved],
            lambda: inspect_experts([site for _, site in moved], optimizer),
        )
        for row, site in moved:
            set_home(site, after_LE[row], self.block_home_LE[row])
        for chunk in self._chunks:
            guard_shards(chunk.trunk, away=not np.array_equal(after_LE, self.block_home_LE))
        for part in [] if optimizer is None else chained(optimizer):
            if part not in self._guarded:
                OptimizerCheckpoint(part, self._away_LE)
                self._guarded.add(part)
        return received, after_LE

    def _objection_to_moves(self) -> str | None:
        if self._sites and not hasattr(self._groups, "expt_dp"):
            return "the model's pg_collection lacks expt_dp, the ranks that hold the same experts; build it with that"
        for row, site, _ in self._sites:
            moved = moved_experts(site)
            there_E = self.block_home_LE[row] if moved is None else moved.home_E
            if not np.array_equal(there_E, self.home_LE[row]):
                return "this model was attached twice and its homes moved by the other; attach it once"
        return None

    def _make_moving_ranks(self) -> MovingRanks:
        """Join the expert-parallel ranks of a pipeline stage with all expert-data-parallel ranks of each, on each."""
        edp_group = self._groups.expt_dp
        of_ep_ranks = gather_objects(dist.get_process_group_ranks(edp_group), self._group, WHAT)
        ranks = sorted(rank for members in of_ep_ranks for rank in members)
        peers = PeerGroup(edp_group, self._group, ranks=ranks)
        number_GD = np.array([[ranks.index(rank) for rank in members] for members in of_ep_ranks])
        return MovingRanks(peers, number_GD)

    def _away_LE(self) -> NDArray[np.int16] | None:
        return None if np.array_equal(self.home_LE, self.block_home_LE) else self.home_LE


_executed: WeakSet[nn.Module] = WeakSet()
"""Trunks of chunks on which a plan is executed."""

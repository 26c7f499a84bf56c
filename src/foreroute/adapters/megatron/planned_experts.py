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

from foreroute.adapters.megatron.flex_kernels import is_flex, places_of_rank
from foreroute.adapters.megatron.home_placement import HomePlacement
from foreroute.adapters.megatron.hooks import ChunkHooks
from foreroute.adapters.megatron.planned_layer import PlannedLayer, objection_to_layer
from foreroute.adapters.megatron.separate_replicas import RunReplicas, home_parameters, replica_runner
from foreroute.ep import ExpertParallelModel
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.cells import Home
from foreroute.ep.transfer.peers import gather_objects
from foreroute.errors import PlanError
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
        self._homes = HomePlacement(spec, [site for _, site, _ in self._sites], ep_size, self._groups)
        ep_group: Any = self._sites[0][1].block.ep_group if self._sites else self._groups.ep
        of_chunks = [[spec.layers.index(layer) for layer in chunk.layers] for chunk in chunks]
        super().__init__(ep_group, self._homes.block_home_LE, of_chunks)
        # alike in all layers, of which a stage may have none
        self._flex = [site.block.token_dispatcher for _, site, _ in self._sites if is_flex(site.block.token_dispatcher)]
        if self._flex:
            self.executor = "megatron_flex"
        self._of_job: RankConsensus | None = None
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
        received = self._homes.move(home_LE, optimizer, self._of_job)
        return received, self._homes.home_LE


_executed: WeakSet[nn.Module] = WeakSet()
"""Trunks of chunks on which a plan is executed."""

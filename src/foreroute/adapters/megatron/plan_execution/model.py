"""A Megatron-Core model that executes plans, and whose experts move from rank to rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.adapters.megatron.expert_placement.placement import HomePlacement
from foreroute.adapters.megatron.hooks import ChunkHooks
from foreroute.adapters.megatron.plan_execution.execution import (
    planned_batches,
    ranks_of_stage,
    require_layers,
    whole_counts,
)
from foreroute.adapters.megatron.plan_execution.experts import home_parameters
from foreroute.adapters.megatron.plan_execution.layer import PlannedLayer
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.ep.execution import PlanExecution
from foreroute.ep.execution_ranks import ExecutionRanks
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.errors import ReplayError
from foreroute.plan import StepPlan
from foreroute.replay import RoutedModel
from foreroute.trace import RoutingSpec


class PlannedModel(RoutedModel):
    """What plans do with a model, on one rank. How it is recorded and replayed is said by `RoutedMegatron`.

    Args:
        spec: of the whole model.
        chunks: what this rank runs.
        provenance: of what is recorded.
        ep_size: expert-parallel ranks.

    Attributes:
        chunks: what this rank runs: the model, its pipeline stage, or the virtual chunks of that.
        layers: the routed layers of this rank, chunk after chunk.
        execution: the plan that is executed now, or None.
    """

    def __init__(
        self, spec: RoutingSpec, chunks: Sequence[ChunkHooks], provenance: dict[str, str], ep_size: int
    ) -> None:
        of_chunks = [
            RoutingSpec(spec.num_experts, spec.top_k, each.layers, model=spec.model) if each.layers else None
            for each in chunks
        ]
        super().__init__(spec, chunks, of_chunks, provenance)
        self.chunks = chunks
        self.layers = tuple(layer for each in chunks for layer in each.layers)
        self._sites = [site for chunk in chunks for site in chunk.sites]
        self._groups: Any = chunks[0].trunk.pg_collection
        self._homes = HomePlacement(spec, self._sites, ep_size, self._groups)
        self._ranks: ExecutionRanks | None = None
        self._transfers = TransferOptions()
        self.execution: PlanExecution | None = None
        self._num_executions = 0

    def gather_counts(self, micro_batches: Sequence[RouteShard]) -> NDArray[np.int32]:
        """Count the routes of all ranks of this expert-parallel group, as `plan` and `execute` take them.

        A collective call on every rank of the model.

        Args:
            micro_batches: of this rank, in the order in which the schedule will take them, made by `shard`.

        Returns:
            counts_MLGE: int32 [M, L, G, E], the same on every rank of the group and its pipeline stages. Rows without a
                route are not counted; padding that is spread is.

        Raises:
            TraceError: on every rank of the group alike, when one hands in what `shard` did not make.
            CountsError: on every rank of the group alike, when ranks or stages have different numbers of micro-batches.
            TransferError: when a rank does not answer.
        """
        ranks = self._execution_ranks()
        counts = ranks.gather_counts(planned_batches(ranks, micro_batches, "gathering counts"))
        return whole_counts(counts, self.layers, self.spec, self._groups.pp)

    @contextmanager
    def execute(
        self, plan: StepPlan, counts_MLGE: NDArray[np.integer], micro_batches: Sequence[RouteShard]
    ) -> Iterator[PlanExecution]:
        """Serve every MoE layer of every micro-batch by its cell of a plan while the context is open.

        Opened around one call of Megatron's schedule whose forward step is `replaying`, or around `replay` sessions of
        the same micro-batches, with backward inside. Weights may change between two executions and not within one. A
        collective call on every rank of the expert-parallel group and its pipeline stages on entering and on leaving.
        In between no rank asks another on the host.

        Args:
            plan: of these micro-batches, the same on every rank of the group and its pipeline stages. Experts live
                where it says.
            counts_MLGE: what it was made for, from `gather_counts`.
            micro_batches: the routes that the batches bring, in the order in which the schedule takes them.

        Yields:
            The execution.

        Raises:
            PlanError: on every rank alike, when plans differ, or one is for other ranks, layers, experts or homes.
            CountsError: on every rank alike, when the plan was made for other counts, or a micro-batch has others. On
                the rank alone whose forward brings other routes than `micro_batches`; the others end with it.
            PlacementError: on every rank alike, when a layer cannot execute a plan.
            TraceError: on every rank alike, when one hands in what `shard` did not make.
            ReplayError: on every rank alike, when a planned micro-batch was not run, a router did not do what was
                replayed, or a plan is executed already.
            TransferError: when a rank does not answer.
        """
        self._require_no_execution("another one begins")
        self._num_executions += 1
        step, ranks, number_of = self._num_executions, self._execution_ranks(), self.spec.layers.index
        require_layers(ranks, self._sites)
        homes = {number_of(site.layer): home_parameters(site) for site in self._sites}
        layers = [
            PlannedLayer(site, number_of(site.layer), homes, ranks.group, chunk.passes)
            for chunk in self.chunks
            for site in chunk.sites
        ]

        def finish_gathering() -> None:
            for layer in layers:
                layer.finish_gathering()

        execution = PlanExecution(
            ranks,
            step,
            plan,
            counts_MLGE,
            planned_batches(ranks, micro_batches, f"agreeing on the plan of step {step}"),
            self.home_LE,
            homes,
            [[number_of(site.layer) for site in chunk.sites] for chunk in self.chunks],
            before_publishing=finish_gathering,
        )
        with execution.in_force(self), ExitStack() as stack:
            for layer in layers:
                stack.enter_context(layer.in_place())
            yield execution

    def _execution_ranks(self) -> ExecutionRanks:
        if self._ranks is None:
            ep_group = self._sites[0].block.ep_group if self._sites else self._groups.ep
            self._ranks = ranks_of_stage(ep_group, self._groups.pp, self._transfers)
        return self._ranks

    def use(self, transfers: TransferOptions) -> None:
        """Have weights of replicas travel so from the next execution on; by default from peer to peer, a cell ahead.

        Args:
            transfers: the same on every rank of the model. With `paths="host"`, the topology of a plan says how
                many ranks share a node's memory.

        Raises:
            ReplayError: while a plan is executed.
        """
        self._require_no_execution("weights travel in another way")
        if self._ranks is not None:
            self._ranks.close()
        self._ranks, self._transfers = None, transfers

    @property
    def home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the expert-parallel rank that every expert of the whole model lives on now."""
        return self._homes.home_LE

    @property
    def block_home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the homes that Megatron gives experts when it builds a model, and looks for in checkpoints."""
        return self._homes.block_home_LE

    def move_homes(self, homes: StepPlan | NDArray[np.integer], optimizer: Any) -> int:
        """Move experts to other expert-parallel ranks, with all that the optimizer keeps for them.

        A collective call on every rank of the job, between two steps, when gradients have been set to zero. Routers
        go on in logical experts, and so do traces, auxiliary losses, expert bias and counts. What arrives on a rank
        is held beside what is there until all ranks have everything; then it is written in place. The experts of a
        rank are in its slots in ascending order of their ids.

        Args:
            homes: a plan, of which homes alone are taken, or integers [L, E] for the routed layers of `spec`: the rank
                of the expert-parallel group that each expert lives on from now on, E / G on each. The same on every
                rank.
            optimizer: the one that trains the experts, of torch or of Megatron; None where none does.

        Returns:
            Bytes that this rank received from others.

        Raises:
            PlanError: on every rank alike, when homes differ between ranks, are of other layers, experts or ranks, or
                not E / G to a rank.
            TransferError: on every rank alike, when something cannot be moved, such as an expert with a gradient or
                state of an unknown kind, or a rank is gone. Nothing has moved then.
            ReplayError: while a plan is executed.
        """
        self._require_no_execution("experts move")
        return self._homes.move(homes, optimizer)

    def _require_no_execution(self, before: str) -> None:
        if self.execution is not None:
            raise ReplayError(f"a plan is executed on this model; leave that execution before {before}")

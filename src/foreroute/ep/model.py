"""The experts of a model on ranks that execute plans: what is the same in every framework.

Letters: M micro-steps, L routed layers, G ranks of an expert-parallel group, A groups that hold the same experts,
W ranks of all of them, E experts.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.execution import ExecutionHolder, MicroBatch, PassPlan, PlanExecution
from foreroute.ep.owners import join_plans, owners_at
from foreroute.ep.plan_checks import (
    plan_digest,
    planned_counts,
    require_homes,
    require_micro_batches,
    require_ranks,
)
from foreroute.ep.transfer.cells import Home
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import CountsError, PlanError, ReplayError
from foreroute.plan import StepPlan
from foreroute.plan.capabilities import Executor, warn_of_lacks
from foreroute.plan.options import PASS_NAMES
from foreroute.plan.plan_file import plan_from_bytes, plan_to_bytes
from foreroute.plan.schedule import ExecutionSchedule
from foreroute.trace import RoutingTrace


class RankGroups(NamedTuple):
    """The groups of the ranks that execute plans together, made once for the life of a model."""

    consensus: RankConsensus  # of the expert-parallel group
    everyone: RankConsensus  # of the ranks that end alike: pipeline stages, or all groups that hold the same experts
    peers: PeerGroup  # between which weights travel
    members: list[int]  # the numbers in `everyone` of the ranks of this group


class ExpertParallelModel(ABC):
    """The experts of a model, on ranks that execute plans. A framework derives from it and says what is abstract here.

    Models hold it, and have its methods. Every rank runs the model on rows of its own; outside of `execute` the
    framework moves rows. Methods are collective calls of the expert-parallel group, of its pipeline stages, and of the
    groups that hold the same experts, but for `use`, `close` and the homes. What is wrong on one rank is raised on
    every rank alike, and `TransferError` when a rank does not answer. On Hugging Face each raises `AttachError` when
    the model was not loaded with `ep_implementation="foreroute"`.

    Args:
        group: the expert-parallel ranks, G.
        block_home_LE: int16 [L, E], the homes that the framework gives experts when it builds, saves and loads them.
        chunks: the positions in the model of the routed layers that each chunk of this rank runs in one pass.
        owner_AG: int64 [A, G], global ranks, ascending. All A groups hold the same experts, and together each expert
            once; `group` is one of them. By default it holds all of them.

    Attributes:
        home_LE: int16 [L, E], the rank of the group that every expert lives on now.
        transfers: how weights of replicas travel.
        holder: whose `execution` is the plan that is executed now; None until one was executed.
    """

    executor: Executor
    gathers_late: ClassVar[bool] = False  # the weights of a layer may be stale until its first cell of a step runs
    versions_of: Callable[[int], tuple[int, ...]] | None = None  # how often a layer was written to, unless memory tells

    def __init__(
        self,
        group: dist.ProcessGroup,
        block_home_LE: NDArray[np.int16],
        chunks: Sequence[Sequence[int]],
        owner_AG: NDArray[np.int64] | None = None,
    ) -> None:
        block_home_LE.setflags(write=False)  # who changed it in place would tell nobody
        self.home_LE, self.block_home_LE = block_home_LE, block_home_LE
        self.chunks = chunks
        self.holder: ExecutionHolder | None = None
        self._group, self._owner_AG = group, owner_AG
        self.transfers = TransferOptions()
        self._engine: TransferEngine | None = None
        self._step = 0

    @abstractmethod
    def load(self) -> Mapping[int, Home]:
        """Return the memory of this rank's experts that the optimizer updates, by layer and name, as it is now."""

    @abstractmethod
    def require_executable(self, plan: StepPlan) -> None:
        """Raise `PlanError` when a layer of this rank cannot execute a plan."""

    @abstractmethod
    def move(self, home_LE: ArrayLike, optimizer: Any) -> tuple[int, NDArray[np.int16]]:
        """Move experts to these homes on all ranks or on none; return the bytes received here, and the homes."""

    @abstractmethod
    def finish_gathering(self) -> None:
        """Bring weights up to date, before they are copied to host memory."""

    def layers_in_place(self) -> AbstractContextManager[None]:
        """Have the layers of this rank run by the plan while the context is open, where they do not look for one."""
        return nullcontext()

    def places_of_rank(self, plan: StepPlan) -> int | None:
        """Say how many places a rank has under a plan, where kernels send rows by them."""
        return None

    def make_everyone(self) -> RankConsensus | None:
        """Make the group of all ranks that end alike; None where they are those of the expert-parallel group."""
        return None

    def gather_counts(self, find_batches: Callable[[], list[MicroBatch]]) -> NDArray[np.int32]:
        """Count the routes of all expert-parallel ranks, as `plan` and `execute` take them.

        Args:
            find_batches: returns the micro-batches of this rank, in the order in which they will run. Models are given
                what these are made of; a rank without sequences in a micro-step has `trace.select([])` there.

        Returns:
            counts_MLGE: int32 [M, L, G, E], the same on every rank of the group and its pipeline stages. Rows without a
                route are not counted; padding that is spread is.

        Raises:
            TraceError: when a rank hands in what is no micro-batch of the model.
            CountsError: when ranks have different numbers of micro-batches.
        """
        what = "gathering counts"
        with self.groups.everyone.agree(what, CountsError) as vote:
            batches = find_batches()
            otherwise = "ranks have other micro-batches than can be planned ({}); expected as many on each"
            vote.same(f"{len(batches)} micro-batches", otherwise)
            if not batches:
                raise CountsError("there is no micro-batch to plan; hand in one or more")
        counts_MLE = np.zeros((len(batches), *self.home_LE.shape), np.int32)
        counts_MLE[:, self._layers] = [each.counts_LE for each in batches]
        return self._gather(counts_MLE, what)

    def gather_executed(self, executions: Sequence[PlanExecution]) -> NDArray[np.int64]:
        """Gather the assignments that experts computed in ended executions: int64 [M, L, G], on every rank."""
        executed_ML = np.concatenate([each.executed_ML for each in executions])
        return self._gather(executed_ML, "gathering what was executed")

    def _gather(self, counts_ML: NDArray[Any], what: str) -> NDArray[Any]:
        """Gather counts [M, L, ...] of every rank as [M, L, G, ...]; each has zeros for layers of other stages."""
        consensus = self.groups.consensus
        counts_MLG = np.zeros((*counts_ML.shape[:2], consensus.size, *counts_ML.shape[2:]), counts_ML.dtype)
        counts_MLG[:, :, consensus.rank] = counts_ML
        # every count is known to one rank and 0 elsewhere, on the ranks of other pipeline stages too
        ranks = self.groups.everyone if self._owner_AG is None else consensus
        return ranks.most(torch.from_numpy(counts_MLG), what).numpy()

    @contextmanager
    def execute(
        self,
        holder: ExecutionHolder,
        plan: StepPlan | None,
        planned: NDArray[np.integer] | RoutingTrace | Sequence[RoutingTrace],
        find_batches: Callable[[], list[MicroBatch]],
        step: int | None = None,
    ) -> Iterator[PlanExecution]:
        """Compute every routed layer of every micro-batch by its cell of a plan while the context is open.

        Opened around `replay` sessions of the micro-batches, in their order, or around one call of Megatron's schedule
        whose forward step is `replaying`, with backward inside. Every forward of the model is one of them. On Hugging
        Face routed experts give zeros to padding, and to the last token of a sequence, which no row depends on.

        Args:
            holder: where the layers of the model look for the plan. Models hand it in.
            plan: of these micro-batches, the same on every rank of the group and its pipeline stages. Experts live
                where it says. None computes every expert at its home; the counts are still known ahead.
            planned: what it was made for: integers [M, L, G, E], from `gather_counts`; or the traces of all sequences
                of the step, which are counted by the packing of the plan.
            find_batches: as in `gather_counts`. Sessions replay the same objects.
            step: of the optimizer. Executions of one number, such as a recompute and the update after it, load weights
                once, and again behind an update. By default each loads them as they are, and releases its replicas when
                it is left.

        Raises:
            PlanError: when plans differ, one is for other ranks, layers, experts, homes or tokens, or a layer cannot
                execute one.
            CountsError: when the plan was made for other counts, or a micro-batch has others; on the rank alone whose
                forward brings other routes.
            TraceError: when a rank hands in what is no micro-batch of the model.
            ReplayError: when a planned micro-batch was not run, a router did not do what was replayed, a forward
                replays nothing, or a plan is executed already.
        """
        self._require_no_execution("another one begins")
        self._step = self._step + 1 if step is None else step
        execution = self._agree_on_execution(plan, planned, find_batches, keeps_weights=step is not None)
        unknown = execution.is_known_M.count(False)
        if unknown:
            warnings.warn(
                f"in {unknown} of {len(execution.is_known_M)} micro-steps some rank has rows without a route that "
                "later tokens depend on: no plan knows them, so that all ranks exchange counts in every cell, and wait "
                "for them; record those rows, or leave their sequences out",
                stacklevel=3,
            )
        if execution.engine is not None:
            execution.engine.take_records()  # of an execution that failed
            if not (self.gathers_late or any(each.is_at_home for each in execution.passes.values())):
                execution.begin_transfers("update")
        self.holder, holder.execution = holder, execution
        try:
            with self.layers_in_place():
                yield execution
        finally:
            holder.execution = None
        execution.end_transfers()
        with self.groups.everyone.agree(f"ending step {execution.number}", ReplayError):
            execution.require_ran()

    def share_plan(self, make: Callable[[], StepPlan]) -> StepPlan:
        """Give all ranks of an expert-parallel group the plan that the first one makes.

        `make` is called on the first rank alone, and may wait for a thread that plans. When it fails, the other ranks
        raise `PlanError`, and the first its own error.
        """
        group, what, content = self.groups.consensus, "waiting for the plan of the first rank", b""
        with self.groups.everyone.agree(what, PlanError):
            if group.rank == 0:
                plan = make()
                content = plan_to_bytes(plan)
        content = group.from_first(content, what)
        return plan if group.rank == 0 else plan_from_bytes(content)

    def use(self, transfers: TransferOptions) -> None:
        """Have weights of replicas travel so from the next execution on; by default from peer to peer, a cell ahead.

        The same on every rank of the model. With `paths="host"`, the topology of a plan says how many ranks share a
        node's memory. Raises `ReplayError` while a plan is executed.
        """
        self._require_no_execution("weights travel in another way")
        self.close()
        self.transfers = transfers

    def move_homes(self, homes: StepPlan | ArrayLike, optimizer: Any = None) -> int:
        """Move experts to other expert-parallel ranks, with all that the optimizer keeps for them.

        Called on every rank of the job, between two steps, when gradients have been set to zero. Routers go on in
        logical experts, and so do traces, auxiliary losses, expert bias and counts. Nothing is written until all ranks
        have everything. On Hugging Face, move them back to `block_home_LE` before anything is saved or loaded.

        Args:
            homes: a plan, of which homes alone are taken, or integers [L, E]: the rank of the group that each expert
                lives on from now on, E / G of each layer on each. The same on every rank.
            optimizer: the one that trains the experts; None where none does.

        Returns:
            Bytes that this rank received from others.

        Raises:
            PlanError: when homes differ between ranks, are of other layers, experts or ranks, or not E / G to a rank.
            TransferError: when something cannot be moved, such as an expert with a gradient or state of an unknown
                kind, or a rank is gone. Nothing has moved then.
            ReplayError: while a plan is executed.
        """
        self._require_no_execution("experts move")
        received, self.home_LE = self.move(homes.home_LE if isinstance(homes, StepPlan) else homes, optimizer)
        self.home_LE.setflags(write=False)
        if self._engine is not None:
            self._engine.end_step()  # slots hold experts by their old homes
        return received

    def close(self) -> None:
        """Release what weights of replicas travel by, but for groups; it is made again when needed. Never raises."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    @cached_property
    def groups(self) -> RankGroups:
        """The groups of these ranks. A collective call of all of them on first use."""
        # Never made a second time: torch names a group after its ranks and how many groups there are, so that one in
        # the place of a destroyed one could meet what that left in the store.
        consensus = RankConsensus(self._group)
        everyone = self.make_everyone() or consensus
        # nothing is fetched where owners have shares of different sizes, whose shapes must not be compared
        joins_owners = self._owner_AG is not None and self.home_LE.shape[1] % self._owner_AG.size == 0
        ranks, own = (dist.get_process_group_ranks(each) for each in (everyone.group, self._group))
        if joins_owners:
            peers = PeerGroup(ranks=ranks if len(ranks) < dist.get_world_size() else None)
        else:
            peers = PeerGroup(self._group)
        return RankGroups(consensus, everyone, peers, [ranks.index(rank) for rank in own])

    def engine(self, homes: Mapping[int, Home]) -> TransferEngine | None:
        """Return what moves weights of replicas, made for the first execution; None without a layer. Collective."""
        groups = self.groups
        if self._engine is None and homes:
            is_of_all = groups.peers.size == groups.everyone.size
            self._engine = TransferEngine(
                homes,
                self.transfers,
                groups.peers,
                groups.everyone if is_of_all else groups.consensus,
                first=groups.members[0] if is_of_all else 0,
                gathers_late=self.gathers_late,
                versions=self.versions_of,
            )
        return self._engine

    def owner_LE_at(self, home_LE: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return int16 [L, E], the number among all W ranks of the one that keeps each expert, given their homes."""
        return home_LE if self._owner_AG is None else owners_at(home_LE, *self._owner_AG.shape)

    @property
    def _layers(self) -> list[int]:
        return [layer for of_chunk in self.chunks for layer in of_chunk]

    def _agree_on_execution(
        self,
        plan: StepPlan | None,
        planned: Any,
        find_batches: Callable[[], list[MicroBatch]],
        *,
        keeps_weights: bool,
    ) -> PlanExecution:
        """Find all that this rank objects to, and ask the other ranks once; twice where some lack routes."""
        groups, step = self.groups, self._step
        what, rank = f"agreeing on the plan of step {step}", groups.consensus.rank
        with groups.everyone.agree(what, PlanError) as vote:
            plan, counts_MLGE = planned_counts(plan, planned, self.home_LE)
            batches = find_batches()
            self.require_executable(plan)
            require_ranks(plan, groups.consensus.size)
            require_homes(plan, self.home_LE)
            plan.require_counts(counts_MLGE)
            found_MLE, planned_MLE = [each.counts_LE for each in batches], counts_MLGE[:, self._layers, rank]
            require_micro_batches(found_MLE, planned_MLE, self._layers)
            homes = self.load()
            if self._engine is not None:
                self._engine.require_same_memory(homes)
            vote.same(
                f"step {step}, plan {plan_digest(plan)}",
                "ranks hold different plans ({}); every rank of a group and of its pipeline stages must be given the "
                "same plan of the same step, for all layers",
                among=groups.members[0] if self._owner_AG is not None else 0,
            )
            topology = plan.topology
            vote.same(
                f"step {step}, {plan.shape[0]} micro-steps, {topology.redundant_slots} slots by {plan.slots!r}, "
                f"nodes of {topology.ranks_per_node} ranks",
                "expert-parallel groups bring plans that cannot run together ({}); give all groups the same step, as "
                "many micro-steps, and the same slots and nodes",
            )
            in_pass = {name: plan.in_pass(name) for name in PASS_NAMES}
            is_partly_known = not all(each.is_whole for each in batches)
            differs = plan.is_at_home("recompute") != plan.is_at_home("update")
            vote.numbers = is_partly_known, differs, *(int(each.hosts.offsets[-1]) for each in in_pass.values())
        warn_of_lacks(plan, self.executor, self.transfers.paths)
        is_known_M = [True] * len(batches)
        if vote.numbers_GN[groups.members, 0].any():
            partly_M = torch.tensor([not each.is_whole for each in batches], dtype=torch.int32)
            is_known_M = [not any_ for any_ in groups.consensus.most(partly_M, what).tolist()]
        # passes that are alike on all ranks are scheduled once
        names = PASS_NAMES if vote.numbers_GN[:, 1].any() else PASS_NAMES[:1]
        num_replicas_W = vote.numbers_GN[:, 2 : 2 + len(names)].sum(axis=1)
        hosted = self._schedule_passes([in_pass[name] for name in names], counts_MLGE, num_replicas_W)
        passes = dict(zip(PASS_NAMES, hosted * len(PASS_NAMES), strict=False))
        return PlanExecution(
            step,
            plan,
            counts_MLGE,
            batches,
            passes,
            is_known_M,
            keeps_weights,
            self._group,
            self.chunks,
            self.engine(homes),
            self.finish_gathering,
            self.places_of_rank(plan),
        )

    def _schedule_passes(
        self, plans: list[StepPlan], counts_MLGE: NDArray[np.integer], num_replicas_W: NDArray[np.int64]
    ) -> list[PassPlan]:
        """Compile the plan of each pass for this rank, and that by which weights travel, on all ranks at once."""
        groups, paths = self.groups, self.transfers.paths
        own = [ExecutionSchedule(plan, counts_MLGE, groups.consensus.rank, paths=paths) for plan in plans]
        joined, weights = plans, own
        if self._owner_AG is not None:
            joined = join_plans(
                plans, self.owner_LE_at(self.home_LE), groups.everyone, groups.members[0], num_replicas_W
            )
            none_MLWE = np.zeros((*plans[0].shape[:2], groups.everyone.size, plans[0].shape[2]), np.int32)
            weights = [ExecutionSchedule(each, none_MLWE, groups.everyone.rank, paths=paths) for each in joined]
        return [
            PassPlan(plan, schedule, of_all, of_weights)
            for plan, schedule, of_all, of_weights in zip(plans, own, joined, weights, strict=True)
        ]

    def _is_executing(self) -> bool:
        """Return whether a plan is executed on the model, by whichever of its attachments."""
        return self.holder is not None and self.holder.execution is not None

    def _require_no_execution(self, before: str) -> None:
        if self._is_executing():
            raise ReplayError(f"a plan is executed on this model; leave that execution before {before}")

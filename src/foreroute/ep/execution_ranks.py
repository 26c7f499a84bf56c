"""The ranks that execute plans together: what they tell each other, and what brings them weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.plan_checks import agree_on_plan, found_alike, plan_digest, raise_alike
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.home_moves import gathered
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.replica_weights import Home
from foreroute.errors import CountsError, PlanError
from foreroute.plan import StepPlan
from foreroute.plan.capabilities import Executor
from foreroute.plan.hosts import Hosts


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch of this rank.

    Attributes:
        routes: that are replayed on it. Whoever begins its forward hands in the same object.
        counts_LE: integers [L, E], assignments of its rows that have a route, in the layers of this rank.
        is_whole: whether no other row is sent to experts, so that the plan knows all of them.
        num_routed: rows that have a route; those that other ranks send are among them, where ranks share a batch.
        is_shared: whether they do. Rows that the plan does not know shift the part that each of them sends.
    """

    routes: object
    counts_LE: NDArray[np.int64]
    is_whole: bool
    num_routed: int
    is_shared: bool = False


class Owners(NamedTuple):
    """The ranks of several expert-parallel groups of one model, where each expert is kept by one of all.

    Replicas are fetched from owners. Their gradients go to the home in the group of the replica, and from there the
    way of its own, to the owner.

    Attributes:
        consensus: of the W ranks, group after group.
        first: the number among them of the first rank of this group.
        owner_LE: int16 [L, E], the number of the rank that keeps each expert.
    """

    consensus: RankConsensus
    first: int
    owner_LE: NDArray[np.int16]

    def require_plans_together(self, step: int, plan: StepPlan) -> None:
        """Make sure that the plans of all groups can be joined. A collective call.

        Args:
            step: its number.
            plan: of this group.

        Raises:
            PlanError: on every rank alike, when groups have other steps or numbers of micro-steps, use slots in other
                ways, or have nodes of other sizes.
        """
        topology = plan.topology
        use = f"step {step}, {plan.shape[0]} micro-steps, {topology.redundant_slots} slots by {plan.slots!r}"
        use += f", nodes of {topology.ranks_per_node} ranks"
        texts = self.consensus.texts(use, "comparing plans of groups")
        if len(set(texts)) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise PlanError(
                f"expert-parallel groups bring plans that cannot run together ({listed}); give all groups the same "
                "step, as many micro-steps, and the same slots and nodes"
            )

    def join(self, plan: StepPlan) -> StepPlan:
        """Make the transfers of all groups one plan of W ranks, with owners as homes. A collective call.

        Args:
            plan: of this group, executed in a stage.
        """
        num_ranks, num_owners = plan.topology.num_ranks, self.consensus.size
        is_first = self.consensus.rank == self.first
        mine = plan.hosts._replace(tokens_RG=plan.hosts.tokens_RG[:, :0]) if is_first else None
        parts: list[Hosts] = [each for each in gathered(mine, self.consensus.group) if each is not None]
        cell_R = np.concatenate([np.repeat(np.arange(len(h.offsets) - 1), np.diff(h.offsets)) for h in parts])
        order_R = np.argsort(cell_R, kind="stable")
        ranks = [h.rank_R + np.int16(number * num_ranks) for number, h in enumerate(parts)]
        hosts = Hosts(
            self.owner_LE,
            np.searchsorted(cell_R[order_R], np.arange(len(plan.hosts.offsets))),
            np.concatenate([h.expert_R for h in parts])[order_R],
            np.concatenate(ranks)[order_R],
            np.concatenate([h.slot_R for h in parts])[order_R],
            np.concatenate([h.fetched_R for h in parts])[order_R],
            np.zeros((len(cell_R), num_owners), np.int32),
        )
        return replace(plan, topology=replace(plan.topology, num_ranks=num_owners), hosts=hosts)


class ExecutionRanks:
    """The expert-parallel ranks of a pipeline stage, as they agree and as they send weights.

    Args:
        group: on which rows are exchanged.
        consensus: of them.
        options: how weights of replicas travel.
        executor: which framework runs the model.
        peers: of the group, or of the owners; made when weights first travel by default.
        stages: of this rank's peers in the other stages of a pipeline; None for one stage.
        owners: of several groups; None where this one is alone, or its experts are whole in it.
        gathers_late, versions: as in `TransferEngine`.

    Attributes:
        group, consensus, owners, gathers_late: the same.
        options: how weights of replicas travel, from the next engine on.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        consensus: RankConsensus,
        options: TransferOptions,
        executor: Executor,
        *,
        peers: PeerGroup | None = None,
        stages: RankConsensus | None = None,
        owners: Owners | None = None,
        gathers_late: bool = False,
        versions: Callable[[int], tuple[int, ...]] | None = None,
    ) -> None:
        self.owners, self._versions = owners, versions
        self.group, self.consensus, self.options, self.gathers_late = group, consensus, options, gathers_late
        self._executor, self._peers, self._stages = executor, peers, stages
        self._engine: TransferEngine | None = None

    @property
    def everyone(self) -> RankConsensus:
        """The ranks that end alike: those of the group, and of the groups that hold the same experts."""
        return self.consensus if self.owners is None else self.owners.consensus

    def engine(self, homes: Mapping[int, Home]) -> TransferEngine:
        """What moves weights of replicas, made when a plan is first executed. A collective call."""
        if self._engine is None:
            peers = self._peers or PeerGroup(self.group)
            first = 0 if self.owners is None else self.owners.first
            ranks = self.everyone if peers.size == self.everyone.size else self.consensus
            self._engine = TransferEngine(
                homes, self.options, peers, ranks, first=first, gathers_late=self.gathers_late, versions=self._versions
            )
        return self._engine

    def forget_weights(self) -> None:
        """Experts have moved: no slot holds them any more."""
        if self._engine is not None:
            self._engine.end_step()

    def close(self) -> None:
        """Give back what weights travel by. Never raises: errors end here too."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def raise_alike(self, error: type[Exception], mine: str | None, what: str) -> None:
        """Raise on every rank of the group and of its other stages, when one of them objects.

        A collective call of all stages: not for what happens inside a schedule, where each is elsewhere.
        """
        if self._stages is not None:
            # the other ranks of the group hear of it below, and through them their own stages
            mine = "; ".join(self._stages.objections(mine, what)) or None
        raise_alike(self.everyone, error, mine, what)

    def agree_on_plan(self, step: int, plan: StepPlan, what: str) -> None:
        """Make sure that all ranks of the group, and of its other stages, are about to execute the same plan.

        Groups that hold the same experts have plans of their own, of the same step.

        Raises:
            PlanError: on every rank alike, when plans or steps differ, or the plan is for other ranks.
        """
        if self._stages is not None:
            digests, mine = self._stages.texts(plan_digest(plan), what), None
            if len(set(digests)) > 1:
                listed = "; ".join(f"stage {stage}: plan {digest}" for stage, digest in enumerate(digests))
                mine = (
                    f"pipeline stages hold different plans ({listed}); every stage must be given the plan of all layers"
                )
            # the other ranks of the group may be in pipelines that agree
            raise_alike(self.consensus, PlanError, mine, what)
        if self.owners is None:
            agree_on_plan(self.consensus, step, plan, self._executor)
        else:
            found_alike(
                self.everyone, PlanError, what, lambda: agree_on_plan(self.consensus, step, plan, self._executor)
            )
            self.owners.require_plans_together(step, plan)

    def gather_counts(self, micro_batches: Sequence[MicroBatch]) -> NDArray[np.int32]:
        """int32 [M, L, G, E], assignments of every rank in the layers of this stage. A collective call.

        Raises:
            CountsError: on every rank alike, when ranks have other numbers of micro-batches.
        """
        what = "gathering counts"
        texts = self.everyone.texts(f"{len(micro_batches)} micro-batches", what)
        if len(set(texts)) > 1 or not micro_batches:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise CountsError(
                f"ranks have other micro-batches than can be planned ({listed}); expected as many on each"
            )
        counts_MLE = np.array([each.counts_LE for each in micro_batches], np.int32)
        counts_GMLE = self.consensus.gather(torch.from_numpy(counts_MLE), what).numpy()
        return np.ascontiguousarray(np.moveaxis(counts_GMLE, 0, 2))

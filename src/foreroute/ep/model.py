"""A model whose experts a framework has spread over ranks: the plan in force, and where experts live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from foreroute.ep.agreement import RankConsensus, share_plan
from foreroute.ep.execution import ExecutingHooks, InForce, PlanExecution
from foreroute.ep.execution_ranks import ExecutionRanks, MicroBatch, Owners
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.ep.transfer.home_moves import agree_on_homes, move_homes
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import PlacementError, PlanError, ReplayError
from foreroute.layout.rank_rows import block_homes
from foreroute.plan import StepPlan


class SpreadLayer(Protocol):
    """A routed layer of which this rank has some experts.

    Attributes:
        number: its position among the routed layers.
        path: of its experts in the model, for errors.
        slices: the number of this rank among those that share its batch, and how many they are.
        row_E: int64 [E], the row of each expert among those of all ranks; None while they are in order of their ids.
    """

    number: int
    path: str
    slices: tuple[int, int]
    row_E: Tensor | None

    @property
    def owned(self) -> Mapping[str, Tensor]:
        """Name -> [E / W, ...], the memory of this rank's experts that the optimizer updates, by parameter."""

    @property
    def versions(self) -> tuple[int, ...]:
        """How often each of `owned` was written to, which the memory of a DTensor does not count."""

    def parameters(self) -> Mapping[str, Tensor]:
        """The same as the parameters that an optimizer has."""

    def objection_to_replicas(self) -> str | None:
        """What keeps its experts from being replicas on other ranks; None."""

    def begin(self) -> None:
        """A plan is about to be executed: take `owned` up."""

    def set_homes(self, home_E: NDArray[np.int16]) -> None:
        """Experts have moved to these homes, int16 [E]."""


class ExpertParallelModel:
    """An expert-parallel model, as `RoutedTransformer` executes plans on it.

    Every rank of a group runs the model on rows of its own. Outside of `execute` the framework moves rows.

    Args:
        layers: routed layers in order of the model, E experts each.
        num_experts: E.
        group: the expert-parallel ranks, G.
        owner_AG: int64 [A, G], global ranks, ascending. All A groups hold the same experts, and together each expert
            once; `group` is one of them.

    Attributes:
        layers: the same.
        home_LE: int16 [L, E], the rank of the group that every expert lives on.
        in_force: the plan that is executed now, if one is.
    """

    def __init__(
        self,
        layers: Sequence[SpreadLayer],
        num_experts: int,
        group: dist.ProcessGroup,
        owner_AG: NDArray[np.int64],
    ) -> None:
        self.layers = list(layers)
        self.home_LE = np.tile(block_homes(num_experts, owner_AG.shape[1]).astype(np.int16), (len(layers), 1))
        self.block_home_LE = self.home_LE.copy()
        self.in_force = InForce()
        self._group, self._owner_AG = group, owner_AG
        self._transfers = TransferOptions(paths="direct")
        self._ranks: ExecutionRanks | None = None
        self._peers: PeerGroup | None = None
        self._guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._step = 0

    @property
    def ranks(self) -> ExecutionRanks:
        """The ranks as they execute plans. A collective call of all owners where they were not asked for before."""
        if self._ranks is None:
            consensus, owners = RankConsensus(self._group), None
            if len(self._owner_AG) == 1:
                self._peers = PeerGroup(self._group)
            else:
                members = self._owner_AG.reshape(-1).tolist()
                first = members.index(dist.get_process_group_ranks(self._group)[0])
                owners = Owners(RankConsensus(ranks=members), first, self._owner_LE(self.home_LE))
                shared = members if len(members) < dist.get_world_size() else None
                # nothing is fetched where shares differ, and shapes of shards are compared
                self._peers = PeerGroup(ranks=shared) if self._unequal() is None else PeerGroup(self._group)
            self._ranks = ExecutionRanks(
                self._group,
                consensus,
                self._transfers,
                "hf",
                peers=self._peers,
                owners=owners,
                versions=lambda layer: self.layers[layer].versions,
            )
        return self._ranks

    def use(self, transfers: TransferOptions) -> None:
        """See `RoutedTransformer.use`."""
        self._require_none("weights travel otherwise")
        self._transfers = transfers
        if self._ranks is not None:
            self._ranks.close()
            self._ranks.options = transfers

    def close(self) -> None:
        """See `RoutedTransformer.close`."""
        if self._ranks is not None:
            self._ranks.close()

    def share_plan(self, make: Callable[[], StepPlan]) -> StepPlan:
        """See `RoutedTransformer.share_plan`."""
        return share_plan(self.ranks.consensus, self.ranks.everyone, make)

    @contextmanager
    def execute(
        self,
        hooks: ExecutingHooks,
        plan: StepPlan,
        counts_MLGE: NDArray[np.integer],
        micro_batches: Sequence[MicroBatch],
        step: int | None,
    ) -> Iterator[PlanExecution]:
        """What `RoutedTransformer.execute` says, of the model that these hooks are on."""
        self._require_none("another one begins")
        if (unequal := self._unequal()) is not None:
            mine = unequal if plan.num_replicas_ML.any() else None
            self.ranks.raise_alike(PlanError, mine, "looking at the plan")
        self._step = self._step + 1 if step is None else step
        for layer in self.layers:
            layer.begin()
        execution = PlanExecution(
            self.ranks,
            self._step,
            plan,
            counts_MLGE,
            micro_batches,
            self.home_LE,
            {layer.number: layer.owned for layer in self.layers},
            [range(len(self.layers))],
            keeps_weights=step is not None,
        )
        self.in_force.hooks = hooks
        with execution.in_force(hooks):
            yield execution

    def move_homes(self, home_LE: ArrayLike, optimizer: torch.optim.Optimizer | None) -> int:
        """See `RoutedTransformer.move_homes`."""
        self._require_none("experts move")
        ranks, base = self.ranks, getattr(optimizer, "optimizer", optimizer)
        if base is not None and base not in self._guarded:  # accelerate wraps the one that has state
            base.register_state_dict_pre_hook(self.require_block_homes)
            base.register_load_state_dict_pre_hook(self.require_block_homes)
            self._guarded.add(base)
        assert self._peers is not None, "they are made with the ranks"
        after_LE = agree_on_homes(ranks.everyone, self.home_LE, home_LE, self._owner_AG.shape[1], self._unequal())
        for layer in self.layers:
            layer.begin()
        received = move_homes(
            self._peers,
            ranks.everyone,
            self._owner_LE(self.home_LE),
            self._owner_LE(after_LE),
            [layer.parameters() for layer in self.layers],
            base,
        )
        self.home_LE = after_LE
        for layer, home_E in zip(self.layers, after_LE, strict=True):
            layer.set_homes(home_E)
        if ranks.owners is not None:
            ranks.owners = ranks.owners._replace(owner_LE=self._owner_LE(after_LE))
        ranks.forget_weights()
        return received

    def require_block_homes(self, *_: object) -> None:
        """Raise `PlacementError` while experts live elsewhere than the framework saves and loads them."""
        if (self.home_LE != self.block_home_LE).any():
            raise PlacementError(
                "experts have moved, and the framework saves and loads them at its own homes; call "
                "routed.move_homes(routed.block_home_LE, optimizer) before, on every rank"
            )

    def _require_none(self, before: str) -> None:
        """Raise `ReplayError` while a plan is executed, by whichever session of the model."""
        hooks = self.in_force.hooks
        if hooks is not None and hooks.execution is not None:
            raise ReplayError(f"a plan is executed on this model; leave that execution before {before}")

    def _unequal(self) -> str | None:
        """What keeps experts from being fetched and moved; None where every rank keeps as many."""
        num_experts, num_owners = self.home_LE.shape[1], self._owner_AG.size
        if num_experts % num_owners == 0:
            return None
        return (
            f"{num_experts} experts are kept by {num_owners} ranks in shares of different sizes, and are neither "
            "fetched nor moved then; spread the model over as many ranks as divide them, or execute no plan (None)"
        )

    def _owner_LE(self, home_LE: NDArray[np.int16]) -> NDArray[np.int16]:
        """int16 [L, E], the number of the rank that owns each expert: a block of those of its home, in order of id."""
        num_groups, num_ranks = self._owner_AG.shape
        num_local = home_LE.shape[1] // num_ranks
        owner_LE = np.empty_like(home_LE)
        # as torch.chunk, and so FSDP2, cuts them: the last groups may have fewer, or none
        blocks = np.arange(num_local, dtype=np.int16) // np.int16(-(-num_local // num_groups)) * np.int16(num_ranks)
        for owner_E, home_E in zip(owner_LE, home_LE, strict=True):
            for rank in range(num_ranks):
                owner_E[home_E == rank] = blocks + rank
        return owner_LE

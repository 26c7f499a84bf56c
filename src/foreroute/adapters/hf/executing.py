"""Plans on a Hugging Face model: its experts, which transformers has spread over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from foreroute.ep import ExpertParallelModel
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.home_moves import MovingRanks, agree_on_homes, inspect_stacked, move_layers
from foreroute.ep.transfer.segments import shard_moves
from foreroute.errors import PlacementError, PlanError
from foreroute.layout.rank_rows import block_homes
from foreroute.plan import StepPlan

if TYPE_CHECKING:
    from foreroute.adapters.hf.expert_parallel import ForerouteEP
    from foreroute.adapters.hf.routed_transformer import TransformerHooks


class SpreadExperts(ExpertParallelModel):
    """The experts of a model that was loaded with `ep_implementation="foreroute"`, in its routed layers."""

    executor = "hf"
    holder: TransformerHooks | None

    def __init__(
        self,
        layers: Sequence[ForerouteEP],
        num_experts: int,
        group: dist.ProcessGroup,
        owner_AG: NDArray[np.int64],
    ) -> None:
        num_groups, num_ranks = owner_AG.shape
        block_home_LE = np.tile(block_homes(num_experts, num_ranks).astype(np.int16), (len(layers), 1))
        super().__init__(group, block_home_LE, [range(len(layers))], owner_AG if num_groups > 1 else None)
        self.layers = list(layers)
        self.versions_of = lambda layer: self.layers[layer].versions  # the memory of a DTensor counts no writes
        self._guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def load(self) -> dict[int, Mapping[str, Tensor]]:
        for layer in self.layers:
            layer.begin()
        return {layer.number: layer.owned for layer in self.layers}

    def make_everyone(self) -> RankConsensus | None:
        return None if self._owner_AG is None else RankConsensus(ranks=self._owner_AG.reshape(-1).tolist())

    def require_executable(self, plan: StepPlan) -> None:
        if not plan.num_replicas_ML.any():
            return
        if unequal := self._objection_to_shares():
            raise PlanError(unequal)
        if why := next(filter(None, (layer.objection_to_replicas() for layer in self.layers)), None):
            raise PlanError(f"the plan has replicas, and {why}; plan with no redundant slots, or execute None")

    def finish_gathering(self) -> None:
        pass  # shards of FSDP2, which are sent, are never stale

    def move(self, home_LE: ArrayLike, optimizer: Any) -> tuple[int, NDArray[np.int16]]:
        base, (consensus, everyone, peers, _) = getattr(optimizer, "optimizer", optimizer), self.groups
        if base is not None and base not in self._guarded:  # accelerate wraps the one that has state
            base.register_state_dict_pre_hook(self.require_block_homes)
            base.register_load_state_dict_pre_hook(self.require_block_homes)
            self._guarded.add(base)
        after_LE = agree_on_homes(everyone, self.home_LE, home_LE, consensus.size, self._objection_to_shares())
        owner_LE, next_owner_LE = self.owner_LE_at(self.home_LE), self.owner_LE_at(after_LE)
        changed = np.flatnonzero((owner_LE != next_owner_LE).any(axis=1)).tolist()
        for layer in self.layers:
            layer.begin()
        received = move_layers(
            everyone,
            MovingRanks(peers, np.arange(peers.size)[:, None]),
            [shard_moves(owner_LE[number], next_owner_LE[number]) for number in changed],
            lambda: [
                inspect_stacked(f"routed layer {number}", self.layers[number].parameters(), base) for number in changed
            ],
        )
        for layer, home_E in zip(self.layers, after_LE, strict=True):
            layer.set_homes(home_E)
        return received, after_LE

    def require_block_homes(self, *_: object) -> None:
        """Raise `PlacementError` while experts live elsewhere than the framework saves and loads them."""
        if (self.home_LE != self.block_home_LE).any():
            raise PlacementError(
                "experts have moved, and the framework saves and loads them at its own homes; call "
                "routed.move_homes(routed.block_home_LE, optimizer) before, on every rank"
            )

    def _objection_to_shares(self) -> str | None:
        """Return what keeps experts from being fetched and moved; None where every rank keeps as many."""
        num_experts = self.home_LE.shape[1]
        num_owners = self.groups.consensus.size if self._owner_AG is None else self._owner_AG.size
        if num_experts % num_owners == 0:
            return None
        return (
            f"{num_experts} experts are kept by {num_owners} ranks in shares of different sizes, and are neither "
            "fetched nor moved then; spread the model over as many ranks as divide them, or execute no plan (None)"
        )

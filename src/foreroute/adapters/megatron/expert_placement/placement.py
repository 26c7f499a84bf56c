"""Where experts live, and how they move: what Megatron adds to `foreroute.ep.transfer.home_moves`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.adapters.megatron.expert_placement.checkpoints import OptimizerCheckpoint
from foreroute.adapters.megatron.expert_placement.dispatch_permutation import permutation_of, set_home
from foreroute.adapters.megatron.expert_placement.parameters import (
    OptimizerState,
    chained,
    expert_slots,
    held_tensors,
    optimizer_state,
)
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.home_moves import MovingRanks, agree_on_homes, all_or_none, bring, gathered
from foreroute.ep.transfer.moves import shard_moves
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.segments import LayerTransfer
from foreroute.errors import TransferError
from foreroute.layout.rank_rows import block_homes
from foreroute.plan import StepPlan
from foreroute.trace import RoutingSpec


class HomePlacement:
    """The home placement of one model.

    Args:
        spec: of the whole model.
        sites: the routers of this rank, in the order of their layers.
        num_ep_ranks: G, expert-parallel ranks.
        groups: Megatron's ProcessGroupCollection of the model.

    Attributes:
        home_LE: int16 [L, E], the expert-parallel rank of every expert of the whole model.
        block_home_LE: int16 [L, E], where Megatron puts them when it builds a model.
    """

    def __init__(self, spec: RoutingSpec, sites: Sequence[ChunkRouter], num_ep_ranks: int, groups: Any) -> None:
        block_E = block_homes(spec.num_experts, num_ep_ranks).astype(np.int16)
        self.block_home_LE = _fixed(np.tile(block_E, (spec.num_layers, 1)))
        self.home_LE = self.block_home_LE
        self._num_ep_ranks = num_ep_ranks
        self._sites = [(spec.layers.index(site.layer), site) for site in sites]
        self._groups = groups
        self._consensus: RankConsensus | None = None
        self._ranks: MovingRanks | None = None
        self._guarded: WeakSet[Any] = WeakSet()

    def move(self, homes: StepPlan | NDArray[np.integer], optimizer: Any) -> int:
        """As `RoutedModel.move_homes`."""
        consensus = self._consensus = self._consensus or RankConsensus()
        given_LE = homes.home_LE if isinstance(homes, StepPlan) else homes
        agreed_LE = agree_on_homes(consensus, self.home_LE, given_LE, self._num_ep_ranks, self._objection())
        after_LE = _fixed(agreed_LE.copy())
        moved = [(row, site) for row, site in self._sites if (self.home_LE[row] != after_LE[row]).any()]
        transfers = all_or_none(consensus, lambda: _inspect([site for _, site in moved], optimizer))
        if moved and self._ranks is None:
            self._ranks = _moving_ranks(self._sites[0][1].block.ep_group, self._groups.expt_dp)
        moves = [shard_moves(self.home_LE[row], after_LE[row]) for row, _ in moved]
        # other pipeline stages may move theirs, and this rank votes with them
        received = bring(consensus, self._ranks if moved else None, transfers, moves)
        for transfer in transfers:
            transfer.commit()
        for row, site in moved:
            set_home(site, after_LE[row], self.block_home_LE[row])
        self.home_LE = after_LE
        self._guard(optimizer)
        return received

    def _objection(self) -> str | None:
        if self._sites and not hasattr(self._groups, "expt_dp"):
            return "the model's pg_collection lacks expt_dp, the ranks that hold the same experts; build it with that"
        for row, site in self._sites:
            permutation = permutation_of(site)
            there_E = self.block_home_LE[row] if permutation is None else permutation.home_E
            if not np.array_equal(there_E, self.home_LE[row]):
                return "this model was attached twice and its homes moved by the other; attach it once"
        return None

    def _guard(self, optimizer: Any) -> None:
        """Have checkpoints of an optimizer follow its experts from now on."""
        for part in [] if optimizer is None else chained(optimizer):
            if part not in self._guarded:
                OptimizerCheckpoint(part, self._away_LE)
                self._guarded.add(part)

    def _away_LE(self) -> NDArray[np.int16] | None:
        return None if np.array_equal(self.home_LE, self.block_home_LE) else self.home_LE


def _inspect(sites: list[ChunkRouter], optimizer: Any) -> list[LayerTransfer]:
    """What there is to move, found without a change.

    Raises:
        TransferError: when it cannot be moved.
    """
    state: OptimizerState = {} if optimizer is None else optimizer_state(optimizer)
    transfers = []
    for site in sites:
        slots = expert_slots(site)
        untrained = sorted(
            {
                name
                for slot in slots
                for name, p in slot.items()
                if optimizer is not None and p.requires_grad and p not in state
            }
        )
        if untrained:
            raise TransferError(
                f"{untrained[0]} of the experts of {site.path} is trained, and is no parameter of the optimizer; pass "
                "the one that trains this model"
            )
        counts = frozenset(count for slot in slots for p in slot.values() if p in state for count in state[p].counts)
        transfers.append(LayerTransfer(site.path, [held_tensors(slot, state) for slot in slots], counts))
    return transfers


def _fixed(home_LE: NDArray[np.int16]) -> NDArray[np.int16]:
    home_LE.setflags(write=False)
    return home_LE


def _moving_ranks(ep_group: Any, edp_group: Any) -> MovingRanks:
    """All expert-parallel ranks of a pipeline stage, with all expert-data-parallel ranks of each.

    All of them must call it together.

    Args:
        ep_group: the expert-parallel group of this rank.
        edp_group: its expert-data-parallel group, the ranks that hold the same experts.
    """
    of_ep_ranks = gathered(dist.get_process_group_ranks(edp_group), ep_group)
    ranks = sorted(rank for members in of_ep_ranks for rank in members)
    peers = PeerGroup(edp_group, ep_group, ranks=ranks)
    number_GD = np.array([[ranks.index(rank) for rank in members] for members in of_ep_ranks])
    return MovingRanks(peers, peers.group, number_GD)

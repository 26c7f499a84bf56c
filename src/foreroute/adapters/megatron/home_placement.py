"""Where experts live, and how they move: what Megatron adds to `foreroute.ep.transfer.home_moves`.

A router goes on in logical experts: its weights, bias, counters and losses, what is recorded and what is replayed. Its
map and its weights have a column for each expert. The columns are put in the order of the ranks' local experts where
the MoE layer gives them to its dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from foreroute.adapters.megatron.discover import ChunkRouter, objection_to_output
from foreroute.adapters.megatron.expert_parameters import (
    OptimizerState,
    chained,
    held_tensors,
    local_expert_parameters,
    optimizer_state,
)
from foreroute.adapters.megatron.home_checkpoints import ExpertsCheckpoint, OptimizerCheckpoint
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.home_moves import WHAT, MovingLayer, MovingRanks, agree_on_homes, move_layers
from foreroute.ep.transfer.peers import PeerGroup, gather_objects
from foreroute.ep.transfer.segments import shard_moves
from foreroute.errors import PlacementError, TransferError
from foreroute.layout.rank_rows import block_homes
from foreroute.trace import RoutingSpec


class HomePlacement:
    """The homes of the experts of one whole model, whose `sites` are the routers of this rank in order of layers."""

    def __init__(self, spec: RoutingSpec, sites: Sequence[ChunkRouter], num_ep_ranks: int, groups: Any) -> None:
        block_E = block_homes(spec.num_experts, num_ep_ranks).astype(np.int16)
        # int16 [L, E], the expert-parallel rank of every expert, as Megatron builds the model and now
        self.block_home_LE = _fixed(np.tile(block_E, (spec.num_layers, 1)))
        self.home_LE = self.block_home_LE
        self._num_ep_ranks = num_ep_ranks
        self._sites = [(spec.layers.index(site.layer), site) for site in sites]
        self._groups = groups  # Megatron's ProcessGroupCollection
        self._ranks: MovingRanks | None = None
        self._guarded: WeakSet[Any] = WeakSet()

    def move(self, given_LE: ArrayLike, optimizer: Any, consensus: RankConsensus) -> int:
        """Move experts as `ExpertParallelModel.move_homes` says, where all ranks of the job agree."""
        agreed_LE = agree_on_homes(consensus, self.home_LE, given_LE, self._num_ep_ranks, self._objection())
        after_LE = _fixed(agreed_LE.copy())
        moved = [(row, site) for row, site in self._sites if (self.home_LE[row] != after_LE[row]).any()]
        if moved and self._ranks is None:
            self._ranks = _moving_ranks(self._sites[0][1].block.ep_group, self._groups.expt_dp)
        # other pipeline stages may move theirs, and this rank votes with them
        received = move_layers(
            consensus,
            self._ranks if moved else None,
            [shard_moves(self.home_LE[row], after_LE[row]) for row, _ in moved],
            lambda: _inspect([site for _, site in moved], optimizer),
        )
        for row, site in moved:
            set_home(site, after_LE[row], self.block_home_LE[row])
        self.home_LE = after_LE
        for part in [] if optimizer is None else chained(optimizer):
            # from now on, checkpoints of the optimizer follow its experts
            if part not in self._guarded:
                OptimizerCheckpoint(part, self._away_LE)
                self._guarded.add(part)
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

    def _away_LE(self) -> NDArray[np.int16] | None:
        return None if np.array_equal(self.home_LE, self.block_home_LE) else self.home_LE


class DispatchPermutation:
    """Stands for `preprocess` of one MoE layer, on the instance, while its experts are not where Megatron puts them."""

    def __init__(self, site: ChunkRouter, home_E: NDArray[np.int16]) -> None:
        # the expert-parallel rank of every expert; a rank has its own in ascending order
        self.home_E = home_E
        self._site = site
        self._preprocess = site.block.preprocess
        # the logical expert of each local expert, those of rank 0 first
        self._order_E = torch.from_numpy(np.argsort(home_E, kind="stable"))
        self._checkpoint = ExpertsCheckpoint(site, home_E)
        site.block.__dict__["preprocess"] = self

    def __call__(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """Dispatch as `MoELayer.preprocess` does, by `probs` and a bool `routing_map` [N, E] in order of experts."""
        if objection := objection_to_output(self._site, probs, routing_map):
            raise PlacementError(f"{objection}. Homes cannot be moved in this configuration")
        if self._order_E.device != probs.device:
            self._order_E = self._order_E.to(probs.device)
        in_order = probs.index_select(1, self._order_E), routing_map.index_select(1, self._order_E)
        return self._preprocess(hidden_states, *in_order)

    def remove(self) -> None:
        del self._site.block.__dict__["preprocess"]
        self._checkpoint.remove()


def permutation_of(site: ChunkRouter) -> DispatchPermutation | None:
    found = site.block.__dict__.get("preprocess")
    return found if isinstance(found, DispatchPermutation) else None


def set_home(site: ChunkRouter, home_E: NDArray[np.int16], block_home_E: NDArray[np.int16]) -> None:
    """Have a layer send tokens to these homes, int16 [E], where Megatron has built its experts at `block_home_E`."""
    before = permutation_of(site)
    if before is not None:
        before.remove()
    if not np.array_equal(home_E, block_home_E):
        DispatchPermutation(site, home_E.copy())


def _inspect(sites: list[ChunkRouter], optimizer: Any) -> list[MovingLayer]:
    """Find what there is to move, without a change, or raise `TransferError` when it cannot be moved."""
    state: OptimizerState = {} if optimizer is None else optimizer_state(optimizer)
    moving = []
    for site in sites:
        experts = local_expert_parameters(site)
        parameters = [(name, p) for expert in experts for name, p in expert.items()]
        if optimizer is not None and (left := {name for name, p in parameters if p.requires_grad and p not in state}):
            raise TransferError(
                f"{min(left)} of the experts of {site.path} is trained, and is no parameter of the optimizer; pass "
                "the one that trains this model"
            )
        counts = frozenset(count for _, p in parameters if p in state for count in state[p].counts)
        moving.append(MovingLayer(site.path, [held_tensors(expert, state) for expert in experts], counts))
    return moving


def _fixed(home_LE: NDArray[np.int16]) -> NDArray[np.int16]:
    home_LE.setflags(write=False)
    return home_LE


def _moving_ranks(ep_group: Any, edp_group: Any) -> MovingRanks:
    """Join the expert-parallel ranks of a pipeline stage with all expert-data-parallel ranks of each, on each."""
    of_ep_ranks = gather_objects(dist.get_process_group_ranks(edp_group), ep_group, WHAT)
    ranks = sorted(rank for members in of_ep_ranks for rank in members)
    peers = PeerGroup(edp_group, ep_group, ranks=ranks)
    number_GD = np.array([[ranks.index(rank) for rank in members] for members in of_ep_ranks])
    return MovingRanks(peers, number_GD)

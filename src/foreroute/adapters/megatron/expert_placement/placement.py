"""Where experts live, and how they move: agreed by all ranks, received as a whole, and only then put in place.

There are four collective stages, and after each of them all ranks go on or none does: the new homes are compared, what
is there is inspected, memory is taken, and rows are received into it. Only then is anything of the model written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.adapters.megatron.expert_placement.checkpoints import OptimizerCheckpoint
from foreroute.adapters.megatron.expert_placement.dispatch_permutation import permutation_of, set_home
from foreroute.adapters.megatron.expert_placement.layer_transfer import (
    LayerTransfer,
    held_tensors,
    require_complete,
    segments_for,
)
from foreroute.adapters.megatron.expert_placement.parameters import (
    OptimizerState,
    chained,
    expert_slots,
    optimizer_state,
)
from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.moves import Moves, shard_moves
from foreroute.ep.transfer.peers import PeerGroup, collective_errors
from foreroute.errors import PlanError, TransferError
from foreroute.files import blake2b_hex
from foreroute.layout import block_homes
from foreroute.plan import StepPlan
from foreroute.trace import RoutingSpec

Done = TypeVar("Done")
WHAT = "moving homes"


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
        self._ranks: PlacementRanks | None = None
        self._guarded: WeakSet[Any] = WeakSet()

    def move(self, homes: StepPlan | NDArray[np.integer], optimizer: Any) -> int:
        """As `RoutedModel.move_homes`."""
        consensus = self._consensus = self._consensus or RankConsensus()
        after_LE = self._agreed(consensus, homes)
        moved = [(row, site) for row, site in self._sites if (self.home_LE[row] != after_LE[row]).any()]
        transfers = _all_or_none(consensus, lambda: _inspect([site for _, site in moved], optimizer))
        received = self._transfer(
            consensus, transfers, [shard_moves(self.home_LE[row], after_LE[row]) for row, _ in moved]
        )
        for transfer in transfers:
            transfer.commit()
        for row, site in moved:
            set_home(site, after_LE[row], self.block_home_LE[row])
        self.home_LE = after_LE
        self._guard(optimizer)
        return received

    def _agreed(self, consensus: RankConsensus, homes: StepPlan | NDArray[np.integer]) -> NDArray[np.int16]:
        """The new homes, the same on all ranks."""
        if objections := consensus.objections(self._objection(homes), WHAT):
            raise PlanError("homes cannot be moved: " + "; ".join(objections))
        after_LE = _fixed(np.asarray(homes.home_LE if isinstance(homes, StepPlan) else homes).astype(np.int16))
        texts = consensus.texts(blake2b_hex(self.home_LE, after_LE), WHAT)
        if len(set(texts)) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise PlanError(f"ranks hold different homes, by their digests ({listed}); give every rank the same ones")
        return after_LE

    def _objection(self, homes: StepPlan | NDArray[np.integer]) -> str | None:
        home_LE = np.asarray(homes.home_LE if isinstance(homes, StepPlan) else homes)
        shape, num_ep_ranks = self.block_home_LE.shape, self._num_ep_ranks
        each = shape[1] // num_ep_ranks
        if home_LE.shape != shape or home_LE.dtype.kind not in "iu":
            return f"homes are {home_LE.dtype} {list(home_LE.shape)}, expected integers {list(shape)}: [L, E]"
        if home_LE.size and not 0 <= home_LE.min() <= home_LE.max() < num_ep_ranks:
            return f"homes are {home_LE.min()} to {home_LE.max()}, expected ranks 0 to {num_ep_ranks - 1}"
        for row, home_E in enumerate(home_LE):
            num_G = np.bincount(home_E, minlength=num_ep_ranks)
            if (num_G != each).any():
                return (
                    f"routed layer {row} has {num_G.tolist()} experts on its ranks, expected {each} on each: "
                    "Megatron wants equally many"
                )
        if self._sites and not hasattr(self._groups, "expt_dp"):
            return "the model's pg_collection lacks expt_dp, the ranks that hold the same experts; build it with that"
        for row, site in self._sites:
            permutation = permutation_of(site)
            there_E = self.block_home_LE[row] if permutation is None else permutation.home_E
            if not np.array_equal(there_E, self.home_LE[row]):
                return "this model was attached twice and its homes moved by the other; attach it once"
        return None

    def _transfer(self, consensus: RankConsensus, transfers: list[LayerTransfer], moves: list[Moves]) -> int:
        """Bring everything to its rank, beside what is there. Returns the bytes that came from other ranks."""
        if not transfers:
            # other pipeline stages may still move theirs, and this rank has a vote in the same two rounds
            _all_or_none(consensus, lambda: None)
            _all_or_none(consensus, lambda: None)
            return 0
        if self._ranks is None:
            self._ranks = PlacementRanks(self._sites[0][1].block.ep_group, self._groups.expt_dp)
        peers, number_GD = self._ranks.peers, self._ranks.number_GD
        said = self._ranks.gather([transfer.parts for transfer in transfers])

        def prepare() -> None:
            for number, transfer in enumerate(transfers):
                of_ranks = [each[number] for each in said]
                require_complete(of_ranks, number_GD, transfer.where)
                transfer.segments = segments_for(peers.rank, moves[number], number_GD, of_ranks)
                transfer.allocate(peers.rank)

        def exchange() -> None:
            # all are posted before one is waited for: a rank that fails has sent what others wait for
            for under_way in [transfer.begin(peers) for transfer in transfers]:
                under_way.wait()

        _all_or_none(consensus, prepare)
        _all_or_none(consensus, exchange)
        return sum(transfer.received for transfer in transfers)

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


def _all_or_none(consensus: RankConsensus, do: Callable[[], Done]) -> Done:
    """Do something on every rank, and raise the same `TransferError` on all of them if one could not."""
    problem = None
    try:
        done = do()
    except RuntimeError as error:  # out of memory, too
        problem = error
    if objections := consensus.objections(None if problem is None else str(problem), WHAT):
        raise TransferError("homes cannot be moved, and none were: " + "; ".join(objections)) from problem
    return done


def _fixed(home_LE: NDArray[np.int16]) -> NDArray[np.int16]:
    home_LE.setflags(write=False)
    return home_LE


class PlacementRanks:
    """The ranks between which experts can move: those with the same layers and the same cut of each expert.

    These are all expert-parallel ranks of a pipeline stage, with all expert-data-parallel ranks of each.

    All of them must make it together.

    Args:
        ep_group: the expert-parallel group of this rank.
        edp_group: its expert-data-parallel group, the ranks that hold the same experts.

    Attributes:
        peers: the ranks.
        number_GD: int64 [G, D], the number among the peers of each expert-data-parallel rank.
    """

    def __init__(self, ep_group: Any, edp_group: Any) -> None:
        of_ep_ranks: list[Any] = [None] * ep_group.size()
        _gather(of_ep_ranks, dist.get_process_group_ranks(edp_group), ep_group)
        ranks = sorted(rank for members in of_ep_ranks for rank in members)
        self.peers = PeerGroup(edp_group, ep_group, ranks=ranks)
        self.number_GD = np.array([[ranks.index(rank) for rank in members] for members in of_ep_ranks])

    def gather(self, mine: Any) -> list[Any]:
        """What each of the ranks says, by its number.

        Raises:
            TransferError: when one does not answer.
        """
        said: list[Any] = [None] * self.peers.size
        _gather(said, mine, self.peers.group)
        return said


def _gather(said: list[Any], mine: Any, group: Any) -> None:
    with collective_errors("moving homes", group):
        dist.all_gather_object(said, mine, group=group)

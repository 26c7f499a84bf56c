"""Where experts live, and how they move: agreed by all ranks, received as a whole, and only then put in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.optim import Optimizer

from foreroute.adapters.megatron.discover import RouterSite
from foreroute.adapters.megatron.homes.carry import Carriage, held_in
from foreroute.adapters.megatron.homes.copies import copies_for, require_complete
from foreroute.adapters.megatron.homes.neighbours import Neighbours
from foreroute.adapters.megatron.homes.optimizers import State, inner_optimizers, optimizer_state
from foreroute.adapters.megatron.homes.remap import NOT_AT_HOME, remap_of, set_home
from foreroute.adapters.megatron.homes.slots import expert_slots
from foreroute.ep.transfer.consensus import Votes
from foreroute.ep.transfer.moves import Moves, shard_moves
from foreroute.errors import PlacementError, PlanError, TransferError
from foreroute.layout import block_homes
from foreroute.plan import StepPlan
from foreroute.trace import RoutingSpec

Done = TypeVar("Done")
WHAT = "moving homes"


class Homes:
    """The home placement of one model.

    Args:
        spec: of the whole model.
        sites: the routers of this rank, in the order of their layers.
        num_places: G, expert-parallel places.
        groups: Megatron's ProcessGroupCollection of the model.

    Attributes:
        home_LE: int16 [L, E], the place of every expert of the whole model.
        block_home_LE: int16 [L, E], where Megatron puts them when it builds a model.
    """

    def __init__(self, spec: RoutingSpec, sites: Sequence[RouterSite], num_places: int, groups: Any) -> None:
        block_E = block_homes(spec.num_experts, num_places).astype(np.int16)
        self.block_home_LE = _fixed(np.tile(block_E, (spec.num_layers, 1)))
        self.home_LE = self.block_home_LE
        self._num_places = num_places
        self._sites = [(spec.layers.index(site.layer), site) for site in sites]
        self._groups = groups
        self._votes: Votes | None = None
        self._neighbours: Neighbours | None = None
        self._guarded: WeakSet[Optimizer] = WeakSet()

    def move(self, homes: StepPlan | NDArray[np.integer], optimizer: Any) -> int:
        """As `RoutedModel.move_homes`."""
        votes = self._votes = self._votes or Votes()
        after_LE = self._agreed(votes, homes)
        moved = [(row, site) for row, site in self._sites if (self.home_LE[row] != after_LE[row]).any()]
        carriages = _all_or_none(votes, lambda: _inspect([site for _, site in moved], optimizer))
        received = self._carry(votes, carriages, [shard_moves(self.home_LE[row], after_LE[row]) for row, _ in moved])
        for carriage in carriages:
            carriage.put_in_place()
        for row, site in moved:
            set_home(site, after_LE[row], self.block_home_LE[row])
        self.home_LE = after_LE
        self._guard(optimizer)
        return received

    def _agreed(self, votes: Votes, homes: StepPlan | NDArray[np.integer]) -> NDArray[np.int16]:
        """The new homes, the same on all ranks."""
        if objections := votes.objections(self._objection(homes), WHAT):
            raise PlanError("homes cannot be moved: " + "; ".join(objections))
        after_LE = _fixed(np.asarray(homes.home_LE if isinstance(homes, StepPlan) else homes).astype(np.int16))
        both = self.home_LE.tobytes() + after_LE.tobytes()
        texts = votes.texts(xxhash.xxh3_128_hexdigest(both), WHAT)
        if len(set(texts)) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise PlanError(f"ranks hold different homes, by their digests ({listed}); give every rank the same ones")
        return after_LE

    def _objection(self, homes: StepPlan | NDArray[np.integer]) -> str | None:
        if isinstance(homes, StepPlan) and len(homes.expert_R):
            return (
                f"the plan has {len(homes.expert_R)} replicas, which Megatron does not execute; plan with "
                "redundant_slots=0, or pass plan.home_LE to take its homes alone"
            )
        home_LE = np.asarray(homes.home_LE if isinstance(homes, StepPlan) else homes)
        shape, num_places = self.block_home_LE.shape, self._num_places
        if home_LE.shape != shape or home_LE.dtype.kind not in "iu":
            return f"homes are {home_LE.dtype} {list(home_LE.shape)}, expected integers {list(shape)}: [L, E]"
        if home_LE.size and not 0 <= home_LE.min() <= home_LE.max() < num_places:
            return f"homes are {home_LE.min()} to {home_LE.max()}, expected ranks 0 to {num_places - 1}"
        for row, home_E in enumerate(home_LE):
            num_G = np.bincount(home_E, minlength=num_places)
            if (num_G != shape[1] // num_places).any():
                return (
                    f"routed layer {row} has {num_G.tolist()} experts on its ranks, expected {shape[1] // num_places} "
                    "on each: Megatron wants equally many"
                )
        if self._sites and not hasattr(self._groups, "expt_dp"):
            return "the model's pg_collection lacks expt_dp, the ranks that hold the same experts; build it with that"
        for row, site in self._sites:
            remap = remap_of(site)
            if not np.array_equal(self.block_home_LE[row] if remap is None else remap.home_E, self.home_LE[row]):
                return "this model was attached twice and its homes moved by the other; attach it once"
        return None

    def _carry(self, votes: Votes, carriages: list[Carriage], moves: list[Moves]) -> int:
        """Bring everything to its rank, beside what is there."""
        if not carriages:
            _all_or_none(votes, lambda: None)
            _all_or_none(votes, lambda: None)
            return 0
        if self._neighbours is None:
            self._neighbours = Neighbours(self._sites[0][1].block.ep_group, self._groups.expt_dp)
        peers, number_GD = self._neighbours.peers, self._neighbours.number_GD
        said = self._neighbours.gather([carriage.parts for carriage in carriages])

        def prepare() -> None:
            for number, carriage in enumerate(carriages):
                of_ranks = [each[number] for each in said]
                require_complete(of_ranks, number_GD, carriage.where)
                carriage.copies = copies_for(peers.rank, moves[number], number_GD, of_ranks)
                carriage.make_room(peers.rank)

        def exchange() -> None:
            # all are posted before one is waited for: a rank that fails has sent what others wait for
            for under_way in [carriage.begin(peers) for carriage in carriages]:
                under_way.wait()

        _all_or_none(votes, prepare)
        _all_or_none(votes, exchange)
        return sum(carriage.received for carriage in carriages)

    def _guard(self, optimizer: Any) -> None:
        """Refuse the state of an optimizer as long as experts are not where Megatron puts them."""
        for inner in inner_optimizers(optimizer):
            if inner not in self._guarded:
                inner.register_state_dict_pre_hook(self._refuse_state)
                inner.register_load_state_dict_pre_hook(self._refuse_state)
                self._guarded.add(inner)

    def _refuse_state(self, *_: Any) -> None:
        if not np.array_equal(self.home_LE, self.block_home_LE):
            raise PlacementError(f"experts of this optimizer {NOT_AT_HOME}")


def _inspect(sites: list[RouterSite], optimizer: Any) -> list[Carriage]:
    """What there is to move, found without a change.

    Raises:
        TransferError: when it cannot be moved.
    """
    state: State = {} if optimizer is None else optimizer_state(optimizer)
    carriages = []
    for site in sites:
        slots = expert_slots(site)
        strangers = sorted(
            {
                name
                for slot in slots
                for name, p in slot.items()
                if optimizer is not None and p.requires_grad and p not in state
            }
        )
        if strangers:
            raise TransferError(
                f"{strangers[0]} of the experts of {site.path} is trained, and is no parameter of the optimizer; pass "
                "the one that trains this model"
            )
        counts = frozenset(count for slot in slots for p in slot.values() if p in state for count in state[p].counts)
        carriages.append(Carriage(site.path, [held_in(slot, state) for slot in slots], counts))
    return carriages


def _all_or_none(votes: Votes, do: Callable[[], Done]) -> Done:
    """Do something on every rank, and raise the same `TransferError` on all of them if one could not."""
    problem = None
    try:
        done = do()
    except RuntimeError as error:  # out of memory, too
        problem = error
    if objections := votes.objections(None if problem is None else str(problem), WHAT):
        raise TransferError("homes cannot be moved, and none were: " + "; ".join(objections)) from problem
    return done


def _fixed(home_LE: NDArray[np.int16]) -> NDArray[np.int16]:
    home_LE.setflags(write=False)
    return home_LE

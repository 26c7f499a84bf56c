"""Redundant slots: buffers for the weights of replicas, and the books of what all ranks hold in them.

The books are kept on every rank for all ranks, by the same calls in the same order, so that senders know what receivers
lack. Transfers write behind autograd's back: each filling raises the version counters, so that a backward pass that
still needs the old content is refused instead of silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from foreroute.ep.transfer.burst import Burst
from foreroute.ep.transfer.cell import Cell
from foreroute.ep.transfer.moves import EMPTY, Moves, held_after
from foreroute.plan import CellPlan, Topology
from foreroute.plan.options import SlotUse


class SlotSet:
    """P slots on every rank, for one cell at a time.

    Attributes:
        tensors: name -> [P, ...], this rank's slots.
        held_GP: int64 [G, P], the expert of `cell.layer` that every slot holds or is being sent; or `EMPTY`.
        cell: that the set was last turned to.
        burst: transfers into the slots that nobody has waited for yet.
    """

    def __init__(self, home: Mapping[str, Tensor], topology: Topology) -> None:
        num_slots = topology.redundant_slots
        self.tensors = {name: shard.new_empty((num_slots, *shard.shape[1:])).detach() for name, shard in home.items()}
        self.held_GP = np.full((topology.num_ranks, num_slots), EMPTY, np.int64)
        self.cell: Cell | None = None
        self.burst: Burst | None = None

    def turn_to(self, cell: Cell) -> None:
        """Make the set that of a cell; experts of another layer are forgotten."""
        if self.cell is None or self.cell.layer != cell.layer:
            self.forget()
        self.cell = cell

    def forget(self) -> None:
        """Take all slots for empty."""
        self.held_GP = np.full_like(self.held_GP, EMPTY)

    def expect(self, moves: Moves, rank: int) -> None:
        """Enter moves that are about to fill the slots."""
        self.held_GP = held_after(moves, self.held_GP)
        if (moves.target_V == rank).any():
            for tensor in self.tensors.values():
                torch.autograd.graph.increment_version(tensor)

    def renew(self) -> None:
        """Leave the buffers to a burst that may still write to them, and forget what they hold."""
        self.tensors = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        self.forget()

    def replicas(self, plan: CellPlan, rank: int) -> dict[str, Tensor]:
        """Name -> [replicas of the rank, ...] in order of slot: views where the slots are neighbours, else copies."""
        slots = np.sort(plan.slot_R[plan.rank_R == rank]).tolist()
        if not slots or slots[-1] - slots[0] == len(slots) - 1:
            first = slots[0] if slots else 0
            return {name: tensor[first : first + len(slots)].detach() for name, tensor in self.tensors.items()}
        return {name: tensor[slots] for name, tensor in self.tensors.items()}


class SlotSets:
    """All sets of slots of a rank, made when they are first needed.

    Args:
        use: "layer" keeps a set for each layer; "shared" takes the set that was used longest ago.
        num_shared: sets that layers of the same shapes share.
        homes: per routed layer, name -> [E / G, ...].
        topology: ranks and slots.
    """

    def __init__(
        self, use: SlotUse, num_shared: int, homes: Sequence[Mapping[str, Tensor]], topology: Topology
    ) -> None:
        self._num_sets = 1 if use == "layer" else num_shared
        self._keys = list(range(len(homes))) if use == "layer" else [_shapes(home) for home in homes]
        self._homes, self._topology = homes, topology
        # in the order of use, the latest last
        self._sets: dict[object, list[SlotSet]] = {key: [] for key in self._keys}

    def __iter__(self) -> Iterator[SlotSet]:
        return (slots for ring in self._sets.values() for slots in ring)

    def of(self, cell: Cell) -> SlotSet:
        """The set of this cell, or that which should be turned to it."""
        ring = self._sets[self._keys[cell.layer]]
        found = next((slots for slots in ring if slots.cell == cell), None)
        if found is None and len(ring) < self._num_sets:
            found = SlotSet(self._homes[cell.layer], self._topology)
        elif found is None:
            found = ring.pop(0)
        else:
            ring.remove(found)
        ring.append(found)
        return found


def _shapes(home: Mapping[str, Tensor]) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    return tuple((name, home[name].shape[1:], home[name].dtype) for name in sorted(home))

"""Redundant slots: buffers for the weights of replicas, and the record of what all ranks hold in theirs.

The record is kept on every rank for all ranks, by the same calls in the same order, so that senders know what receivers
lack. Axis letters: G ranks, R redundant slots of a rank, V replicas of a cell.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer.cells import Cell, Home
from foreroute.ep.transfer.transfers import Transfer
from foreroute.plan import CellPlan, Topology
from foreroute.plan.schedule import CellSchedule
from foreroute.replay.rows import joined_to_device

EMPTY = -1
"""In a table of slots: the slot holds no expert."""


class SlotSet:
    """R slots on every rank, for one cell at a time."""

    def __init__(self, home: Home, topology: Topology) -> None:
        num_slots = topology.redundant_slots
        experts = {name: of_name[0].detach() for name, of_name in home.items()}
        self.tensors = {name: expert.new_empty((num_slots, *expert.shape)) for name, expert in experts.items()}
        self.rows = {name: tensor.unbind() for name, tensor in self.tensors.items()}  # one for each slot
        # the expert of the cell's layer that each slot holds or is being sent
        self.held_GR = np.full((topology.num_ranks, num_slots), EMPTY, np.int64)
        self.cell: Cell | None = None
        self.transfer: Transfer | None = None  # into these slots, not waited for yet
        self.was_prefetched = False

    def assign(self, cell: Cell) -> None:
        """Give the set to a cell; what it holds of another layer is dropped."""
        if self.cell is None or self.cell.layer != cell.layer:
            self.held_GR.fill(EMPTY)
        self.cell = cell

    def holds(self, plan: CellPlan) -> bool:
        """Say whether the slots of all ranks hold the replicas of a cell, or are being sent them."""
        return bool((self.held_GR[plan.rank_R, plan.slot_R] == plan.expert_R).all())

    def lacking(self, moves: CellSchedule, rank: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Select the moves that slots lack, of those that this rank sends and of those that it hosts in a cell."""
        sends, hosted = moves.sends, moves.hosted
        return (
            sends[self.held_GR[sends["peer"], sends["slot"]] != sends["expert"]],
            hosted[self.held_GR[rank, hosted["slot"]] != hosted["expert"]],
        )

    def enter(self, plan: CellPlan, *, fills_mine: bool) -> None:
        """Record that the replicas of a cell are about to fill the slots, some of this rank's among them or none."""
        self.held_GR[plan.rank_R, plan.slot_R] = plan.expert_R
        if fills_mine:
            for tensor in self.tensors.values():
                # Transfers write behind autograd's back. A backward pass that still needs the old content is then
                # refused instead of silently wrong.
                torch.autograd.graph.increment_version(tensor)

    def replicas(self, moves: CellSchedule) -> dict[str, Tensor]:
        """Name -> [V here, ...] in order of slot: views where the slots are neighbours, else copies."""
        slots = np.sort(moves.hosted["slot"]).astype(np.int64)
        # Slots are distinct, so neighbours are those whose first and last are as far apart as they are many.
        if not len(slots) or slots[-1] - slots[0] == len(slots) - 1:
            first = int(slots[0]) if len(slots) else 0
            return {name: tensor[first : first + len(slots)] for name, tensor in self.tensors.items()}
        rows = joined_to_device([slots], next(iter(self.tensors.values())).device)
        return {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}

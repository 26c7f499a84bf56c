"""A dispatcher's columns: one for each slot of each rank, where Megatron has one for each expert.

Rank g owns the S = E / G + P columns from g * S on: its home experts in ascending order of their id, then its redundant
slots. A router goes on in experts. Which of an expert's columns a row takes follows from the plan's split: the rows of
a rank that go to one expert, in order of position, first fill its home, then its replicas in ascending order of rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer import home_row_E
from foreroute.plan import CellPlan
from foreroute.replay import to_device


@dataclass(frozen=True, eq=False)
class CellColumns:
    """The columns of one cell, seen from one rank.

    Attributes:
        expert_C: int64 [C], whose rows a column takes; that of an empty slot takes none.
        start_C, stop_C: int64 [C], of the planned rows of this rank that go to the expert, the first that the column
            takes and the first that it does not.
        home_C: bool [C], whether the column is its expert's home, which takes all rows that were not planned.
        received_GS: int64 [G, S], planned rows from each rank for each slot of this one.
        has_replicas: whether any expert has more than one column.
    """

    expert_C: NDArray[np.int64]
    start_C: NDArray[np.int64]
    stop_C: NDArray[np.int64]
    home_C: NDArray[np.bool_]
    received_GS: NDArray[np.int64]
    has_replicas: bool

    @classmethod
    def of(cls, cell: CellPlan, counts_GE: NDArray[np.integer], rank: int, num_slots: int) -> CellColumns:
        """Those of a cell.

        Args:
            cell: homes, replicas and the split of tokens.
            counts_GE: integers [G, E], the assignments that were planned.
            rank: which of the G ranks this is.
            num_slots: P, redundant slots of each rank.
        """
        num_ranks, num_experts = counts_GE.shape
        num_home = num_experts // num_ranks
        width = num_home + num_slots
        num_columns = num_ranks * width
        expert_C, start_C, stop_C = (np.zeros(num_columns, np.int64) for _ in range(3))
        home_C = np.zeros(num_columns, np.bool_)
        at_home_GE = cell.home_tokens_GE(counts_GE)
        column_E = cell.home_E.astype(np.int64) * width + home_row_E(cell.home_E)
        expert_C[column_E], home_C[column_E] = np.arange(num_experts), True
        stop_C[column_E] = at_home_GE[rank]

        order_R = np.lexsort((cell.rank_R, cell.expert_R))
        expert_R = cell.expert_R[order_R].astype(np.int64)
        column_R = cell.rank_R[order_R].astype(np.int64) * width + num_home + cell.slot_R[order_R]
        tokens_R = cell.tokens_RG[order_R, rank].astype(np.int64)
        # after its home, and after the replicas of the same expert that stand before it
        ends_R = np.cumsum(tokens_R)
        before_R = ends_R - tokens_R
        first_R = np.searchsorted(expert_R, expert_R)
        expert_C[column_R] = expert_R
        start_C[column_R] = at_home_GE[rank, expert_R] + before_R - before_R[first_R]
        stop_C[column_R] = start_C[column_R] + tokens_R

        received_GS = np.zeros((num_ranks, width), np.int64)
        received_GS[:, :num_home] = at_home_GE[:, np.flatnonzero(cell.home_E == rank)]
        here = cell.rank_R == rank
        received_GS[:, num_home + cell.slot_R[here].astype(np.int64)] = cell.tokens_RG[here].T
        return cls(expert_C, start_C, stop_C, home_C, received_GS, len(cell.expert_R) > 0)

    @property
    def sent_GS(self) -> NDArray[np.int64]:
        """int64 [G, S], planned rows of this rank for each slot of each rank."""
        return (self.stop_C - self.start_C).reshape(self.received_GS.shape)

    def fill(self, map_RE: Tensor, weights_RE: Tensor, planned_R: Tensor | None) -> tuple[Tensor, Tensor]:
        """Put what a router hands on into columns.

        Args:
            map_RE: bool [R, E], the experts of every row.
            weights_RE: [R, E], their gate weights, zero elsewhere.
            planned_R: bool [R], the rows that the counts are of; None for all.

        Returns:
            bool [R, C] and [R, C], through which the weights are differentiable.
        """
        device = map_RE.device
        expert_C, home_C = to_device(self.expert_C, device), to_device(self.home_C, device)
        map_RC = map_RE.index_select(1, expert_C)
        if self.has_replicas:
            planned_RE = map_RE if planned_R is None else map_RE & planned_R[:, None]
            nth_RC = planned_RE.cumsum(0, dtype=torch.int32).index_select(1, expert_C) - 1
            start_C, stop_C = to_device(self.start_C, device), to_device(self.stop_C, device)
            taken_RC = (nth_RC >= start_C) & (nth_RC < stop_C)
            if planned_R is not None:
                taken_RC = torch.where(planned_R[:, None], taken_RC, home_C)
            map_RC = map_RC & taken_RC
        else:
            map_RC = map_RC & home_C
        return map_RC, weights_RE.index_select(1, expert_C).masked_fill(~map_RC, 0.0)

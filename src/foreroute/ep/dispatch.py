"""Rows on their way: sent to the ranks that serve them, put in order of group, and brought back to their tokens.

`MicroStepRows` has the index of every row of every cell of a micro-step on the device: segments of all its schedules go
up in one copy, and are made into rows there at once. `Dispatch` sends rows to the ranks that serve them and `Combine`
brings results back and adds them up: each is the other's transpose, so that neither keeps a row. Gate weights travel
with the rows and are applied where an expert computes. Applied at the source, what comes back would have to be kept for
their gradient, K rows of D for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer.peers import collective_errors
from foreroute.plan import CellSchedule
from foreroute.replay import to_device


@dataclass(frozen=True, eq=False)
class CellRows:
    """The rows of one rank in one cell, on the device: int64, one number for each row of the segments of a schedule.

    Attributes:
        schedule: of the cell.
        taken_R: [rows sent], the place of each among this rank's assignments sorted by expert.
        grouped_R: [rows computed], the received row of each; one past the last for padding.
        returned_R: [rows received], the computed row of each.
    """

    schedule: CellSchedule
    taken_R: Tensor
    grouped_R: Tensor
    returned_R: Tensor


class MicroStepRows:
    """The rows of all cells of a micro-step, by layer.

    Args:
        cells: layer -> what this rank does.
        device: that they are uploaded to; it is not waited for.
    """

    def __init__(self, cells: Mapping[int, CellSchedule], device: torch.device) -> None:
        segments = [part for cell in cells.values() for part in (cell.taken, cell.grouped, cell.returned)]
        rows = expand(np.concatenate(segments), device)
        parts = iter(rows.split([int(part[:, 1].sum()) for part in segments]))
        self._cells: dict[int, CellRows] = {}
        for layer, cell in cells.items():
            taken_R, grouped_R, returned_R = next(parts), next(parts), next(parts)
            received = int(cell.receive_G.sum())
            if len(grouped_R) > received:
                # padding lies beyond what is received
                grouped_R = grouped_R.clamp(max=received)
            self._cells[layer] = CellRows(cell, taken_R, grouped_R, returned_R)

    def __getitem__(self, layer: int) -> CellRows:
        return self._cells[layer]


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """Where the rows of one call go.

    Attributes:
        group: the ranks.
        what: the call in words, for errors.
        send_G, receive_G: rows to and from every rank.
        token_R: int64 [rows sent], the token of each.
        assignment_R: int64 [rows sent], its number among the N x K assignments.
        sent_row_A: int64 [N x K], the row that each assignment is sent as; one past the last where it is not sent.
        grouped_R: int64 [rows computed], the received row of each, in order of group; one past the last for padding.
        returned_R: int64 [rows received], the computed row of each.
        top_k: K.
    """

    group: dist.ProcessGroup
    what: str
    send_G: list[int]
    receive_G: list[int]
    token_R: Tensor
    assignment_R: Tensor
    sent_row_A: Tensor
    grouped_R: Tensor
    returned_R: Tensor
    top_k: int

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, what: str, rows: CellRows, ids_NK: Tensor, sent_N: Tensor | None = None
    ) -> DispatchHandle:
        """Turn every rank's share of every expert into tokens.

        Args:
            group: the ranks.
            what: the call in words.
            rows: of the cell.
            ids_NK: int64 [N, K], the expert of each assignment.
            sent_N: int64 [tokens sent], ascending; None for all N.
        """
        top_k = ids_NK.shape[1]
        ids_RK = ids_NK if sent_N is None else ids_NK.index_select(0, sent_N)
        assignment_R = ids_RK.reshape(-1).argsort(stable=True).index_select(0, rows.taken_R)
        token_R = assignment_R // top_k
        if sent_N is not None:
            token_R = sent_N.index_select(0, token_R)
            assignment_R = token_R * top_k + assignment_R % top_k
        num_sent = len(assignment_R)
        sent_row_A = torch.full((ids_NK.numel(),), num_sent, dtype=torch.int64, device=ids_NK.device)
        sent_row_A.index_copy_(0, assignment_R, torch.arange(num_sent, device=ids_NK.device))
        return cls(
            group,
            what,
            send_G=rows.schedule.send_G.tolist(),
            receive_G=rows.schedule.receive_G.tolist(),
            token_R=token_R,
            assignment_R=assignment_R,
            sent_row_A=sent_row_A,
            grouped_R=rows.grouped_R,
            returned_R=rows.returned_R,
            top_k=top_k,
        )

    def to_experts(self, hidden_ND: Tensor, gates_NK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens and their gate weights to [rows computed, D] and [rows computed, 1]; zeros for padding."""
        gates_R1 = None if gates_NK is None else gates_NK.reshape(-1, 1).index_select(0, self.assignment_R)
        rows, gates = self._exchange(hidden_ND, self.token_R, gates_R1, self.send_G, self.receive_G)
        return _taken(rows, gates, self.grouped_R)

    def to_tokens(self, rows_RD: Tensor, gates_R1: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Computed rows to [N, D], added up over the picks of a token in their order, and what is beside them to
        [N, K]; zeros for what was not sent.
        """
        gates_R1 = None if gates_R1 is None else gates_R1.index_select(0, self.returned_R)
        arrived = self._exchange(rows_RD, self.returned_R, gates_R1, self.receive_G, self.send_G)
        picks, gates = _taken(*arrived, self.sent_row_A)
        gates_NK = None if gates is None else gates.view(-1, self.top_k)
        return picks.view(-1, self.top_k, picks.shape[1]).sum(dim=1), gates_NK

    def _exchange(
        self, rows: Tensor, chosen: Tensor, beside: Tensor | None, send_G: list[int], receive_G: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """The chosen rows, and one number beside each, from all ranks; and one more of zeros.

        From the last one is taken what was not sent, and what pads a group. Both travel in one message: the number lies
        in front of the row, in as many columns as hold it.
        """
        width = rows.shape[1]
        front = 0 if beside is None else -(-beside.element_size() // rows.element_size())
        if beside is None:
            packed = rows.index_select(0, chosen)
        else:
            packed = rows.new_empty(len(chosen), front + width + -width % front)
            torch.index_select(rows, 0, chosen, out=packed[:, front : front + width])
            packed[:, :front].view(beside.dtype)[:, :1] = beside
        total = sum(receive_G)
        arrived = rows.new_empty(total + 1, packed.shape[1])
        arrived[total].zero_()
        with collective_errors(self.what, self.group):
            dist.all_to_all_single(arrived[:total], packed, receive_G, send_G, group=self.group)
        if beside is None:
            return arrived, None
        return arrived[:, front : front + width], arrived[:, :front].view(beside.dtype)[:, :1]


class Dispatch(torch.autograd.Function):
    """`Dispatch.apply(hidden_ND, gates_NK, handle)`: rows in order of group [R, D], and their gate weights [R, 1].

    A token's gradients are added over its picks in their order, so that the sum does not depend on where they went.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, gates_NK: Tensor, handle: DispatchHandle) -> tuple[Tensor, Tensor]:
        ctx.handle = handle
        rows, gates = handle.to_experts(hidden_ND, gates_NK)
        assert gates is not None, "as many come as are sent"
        return rows, gates

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        handle: DispatchHandle = ctx.handle
        return *handle.to_tokens(grads[0], grads[1]), None


class Combine(torch.autograd.Function):
    """`Combine.apply(computed_RD, handle)`: results to their source and added up, [N, D]; zeros for rows not sent."""

    @staticmethod
    def forward(ctx: Any, computed_RD: Tensor, handle: DispatchHandle) -> Tensor:
        ctx.handle = handle
        return handle.to_tokens(computed_RD, None)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        handle: DispatchHandle = ctx.handle
        return handle.to_experts(grads[0], None)[0], None


def gather_counts(group: dist.ProcessGroup, mine: Tensor, what: str) -> NDArray[np.int64]:
    """Counts [..., E] of every rank as int64 [..., G, E]. The host waits for them.

    Raises:
        TransferError: when a rank does not answer.
    """
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with collective_errors(f"the counts of {what}", group):
        dist.all_gather(parts, mine, group=group)
    found: NDArray[np.int64] = torch.stack(parts, dim=-2).cpu().numpy()
    return found


def _taken(rows: Tensor, beside: Tensor | None, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
    return rows.index_select(0, chosen), None if beside is None else beside.index_select(0, chosen)


def expand(runs: NDArray[np.int64], device: torch.device) -> Tensor:
    """int64, the index of every row of every run of a `CellSchedule`; the device is not waited for."""
    total = int(runs[:, 1].sum())
    start_B, length_B = to_device(runs, device).unbind(1)
    # Within a run, index and place in the result rise together: their difference is one number per run.
    shift_B = start_B - (length_B.cumsum(0) - length_B)
    return shift_B.repeat_interleave(length_B, output_size=total) + torch.arange(total, device=device)

"""The rows of a cell on their way: to the ranks that serve them, and back.

`rows_on` brings `CellSchedule`s, which are arithmetic on counts, to the device; `DispatchHandle` turns one into tokens.
`Dispatch` sends rows to the ranks that serve them and `Combine` brings results back and adds them up: each is the
other's transpose, so that neither keeps a row. Gate weights travel with the rows and are applied where an expert
computes. Applied at the source, what comes back would have to be kept for their gradient, K rows of D for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer.peers import collective_errors
from foreroute.plan.schedule import CellSchedule
from foreroute.replay.rows import joined_to_device


class RowGroups(NamedTuple):
    """Rows in order of their group, each of which is computed with one expert's weights.

    Attributes:
        sizes: rows of every group.
        ends: int32, on the device, the first row behind each.
    """

    sizes: list[int]
    ends: Tensor


class CellRows(NamedTuple):
    """Where the rows of one cell go on this rank.

    Attributes:
        send_G, receive_G: rows to and from every rank.
        home, replicas: what is computed by the experts that live here, and by the replicas here.
        taken_R: int64 [rows sent], of the assignments sorted by expert, in the order of sending.
        grouped_R: int64 [rows computed], the received row of each; the row of zeros behind them where a part is empty.
        returned_R: int64 [rows received], the computed row of each.
        group_R: int64 [rows computed], the group of each; replicas are counted on behind the homes.
    """

    send_G: list[int]
    receive_G: list[int]
    home: RowGroups
    replicas: RowGroups
    taken_R: Tensor
    grouped_R: Tensor
    returned_R: Tensor
    group_R: Tensor


def rows_on(device: torch.device, schedules: Sequence[CellSchedule]) -> list[CellRows]:
    """The rows of several cells, whose indices are made together on the device, which is not waited for."""
    segments = [runs for cell in schedules for runs in (cell.taken, cell.grouped, cell.returned)]
    sizes = [int(runs[:, 1].sum()) for runs in segments]
    indices = iter(expand(segments, sizes, device))
    every_S = [np.stack([np.arange(len(cell.group_rows_S)), cell.group_rows_S], axis=1) for cell in schedules]
    group_S, length_S = joined_to_device(every_S, device).unbind(1)
    num_computed = [int(cell.group_rows_S.sum()) for cell in schedules]
    of_cells = group_S.repeat_interleave(length_S, output_size=sum(num_computed)).split(num_computed)
    group_rows = [part for cell in schedules for part in np.split(cell.group_rows_S, [cell.num_home])]
    ends = joined_to_device([part.cumsum(dtype=np.int32) for part in group_rows], device)
    groups = map(RowGroups, (part.tolist() for part in group_rows), ends.split([len(part) for part in group_rows]))
    return [
        CellRows(
            send_G=cell.send_G.tolist(),
            receive_G=cell.receive_G.tolist(),
            home=next(groups),
            replicas=next(groups),
            taken_R=next(indices),
            grouped_R=next(indices),
            returned_R=next(indices),
            group_R=group_R,
        )
        for cell, group_R in zip(schedules, of_cells, strict=True)
    ]


def expand(segments: Sequence[NDArray[np.int64]], sizes: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """int64, the index of every row of the segments of a `CellSchedule`, for each array of them."""
    total = sum(sizes)
    start_B, length_B = joined_to_device(segments, device).unbind(1)
    # Within a segment, index and place in the result rise together: their difference is one number per segment.
    shift_B = start_B - (length_B.cumsum(0) - length_B)
    every = shift_B.repeat_interleave(length_B, output_size=total) + torch.arange(total, device=device)
    parts: tuple[Tensor, ...] = every.split(list(sizes))
    return parts


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """Where the rows of one call go.

    Attributes:
        group: the ranks.
        what: the cell in words, for errors.
        rows: of the cell.
        token_R: int64 [rows sent], the token of each.
        assignment_R: int64 [rows sent], its number among the N x K assignments.
        sent_row_A: int64 [N x K], the row that each assignment is sent as; one past the last where it is not sent.
        top_k: K.
    """

    group: dist.ProcessGroup
    what: str
    rows: CellRows
    token_R: Tensor
    assignment_R: Tensor
    sent_row_A: Tensor
    top_k: int

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, what: str, rows: CellRows, ids_NK: Tensor, sent_A: Tensor | None
    ) -> DispatchHandle:
        """Turn every rank's share of every expert into tokens.

        Args:
            group: the ranks.
            what: the cell in words.
            rows: how many go where.
            ids_NK: int64 [N, K], the expert of each assignment.
            sent_A: int64, which assignments are sent, ascending; None for all.
        """
        ids_A, top_k = ids_NK.reshape(-1), ids_NK.shape[1]
        by_expert = (ids_A if sent_A is None else ids_A.index_select(0, sent_A)).argsort(stable=True)
        assignment_R = by_expert.index_select(0, rows.taken_R)
        if sent_A is not None:
            assignment_R = sent_A.index_select(0, assignment_R)
        num_sent = len(assignment_R)
        sent_row_A = torch.full_like(ids_A, num_sent)
        sent_row_A[assignment_R] = torch.arange(num_sent, device=ids_A.device)
        return cls(group, what, rows, assignment_R // top_k, assignment_R, sent_row_A, top_k)

    def to_experts(self, hidden_ND: Tensor, gates_NK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens and their gate weights to [rows computed, D] and [rows computed, 1]; zeros for padding."""
        rows, gates = self.rows, None if gates_NK is None else gates_NK.reshape(-1, 1)
        arrived, beside = self._exchange(hidden_ND, self.token_R, gates, self.assignment_R, rows.send_G, rows.receive_G)
        beside = None if beside is None else beside.index_select(0, rows.grouped_R)
        return arrived.index_select(0, rows.grouped_R), beside

    def to_tokens(self, rows_RD: Tensor, gates_R1: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Computed rows to [N, D], added up over the picks of a token in their order, and what is beside them to
        [N, K]; zeros for what was not sent.
        """
        rows, chosen = self.rows, self.rows.returned_R
        arrived, beside = self._exchange(rows_RD, chosen, gates_R1, chosen, rows.receive_G, rows.send_G)
        if beside is not None:
            beside = beside.index_select(0, self.sent_row_A).view(-1, self.top_k)
        picks = arrived.index_select(0, self.sent_row_A)
        return picks.view(-1, self.top_k, picks.shape[1]).sum(dim=1), beside

    def _exchange(
        self,
        rows: Tensor,
        chosen: Tensor,
        beside: Tensor | None,
        chosen_beside: Tensor,
        send_G: list[int],
        receive_G: list[int],
    ) -> tuple[Tensor, Tensor | None]:
        """The chosen rows, and one number beside each, from all ranks; and a row of zeros behind them.

        That is taken for what was not sent, and for an empty part. Both travel in one message: the number lies in
        front of the row, in as many columns as hold it.
        """
        total, width = sum(receive_G), rows.shape[1]
        if beside is None:
            packed = rows.index_select(0, chosen)
        else:
            front = -(-beside.element_size() // rows.element_size())
            columns = [front, width, -width % front]
            packed = rows.new_empty(len(chosen), sum(columns))
            numbers, values, _ = packed.split(columns, dim=1)
            torch.index_select(rows, 0, chosen, out=values)
            torch.index_select(beside, 0, chosen_beside, out=_as_numbers(numbers, beside.dtype))
        whole = rows.new_empty(total + 1, packed.shape[1])
        arrived, zeros = whole.split([total, 1])
        zeros.zero_()
        with collective_errors(f"tokens of {self.what}", self.group):
            dist.all_to_all_single(arrived, packed, receive_G, send_G, group=self.group)
        if beside is None:
            return whole, None
        numbers, values, _ = whole.split(columns, dim=1)
        return values, _as_numbers(numbers, beside.dtype)


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


class ExchangeRows(torch.autograd.Function):
    """`ExchangeRows.apply(rows_RD, send_G, receive_G, group, what)`: rows from all ranks, in order of rank."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send_G: list[int], receive_G: list[int], group: dist.ProcessGroup, what: str
    ) -> Tensor:
        ctx.given = receive_G, send_G, group, f"gradients of {what}"
        return _exchanged(rows, send_G, receive_G, group, what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], *ctx.given), None, None, None, None


def _exchanged(rows: Tensor, send_G: list[int], receive_G: list[int], group: dist.ProcessGroup, what: str) -> Tensor:
    arrived = rows.new_empty(sum(receive_G), rows.shape[1])
    with collective_errors(what, group):
        dist.all_to_all_single(arrived, rows.contiguous(), receive_G, send_G, group=group)
    return arrived


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


def _as_numbers(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """One number of each row, of the dtype that its first columns hold."""
    return columns if columns.dtype == dtype else columns.view(dtype)[:, :1]

"""The rows of a cell on their way to the ranks that host their experts, and back to their tokens, by `MoveRows`.

Each way is the other's transpose, so that neither keeps a row. Gate weights travel with the rows and are applied where
an expert computes: applied at the source, what comes back would be kept for their gradient, K rows of D for each token.
Where rows go is arithmetic on counts, a `CellSchedule`; `upload_rows` brings it to the device.

N rows: tokens of this rank, or assignments on their way; K picks of a token, A = N K assignments of this rank,
D hidden size, E experts, G ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.places import Places
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.peers import collective_errors
from foreroute.plan.schedule import CellSchedule
from foreroute.replay.rows import joined_to_device

ALIGNMENT = 16
"""Bytes that a GPU loads or stores at once: at a multiple of these, every row begins."""


class MoveRows(torch.autograd.Function):
    """`MoveRows.apply(handle, to_experts, rows_ND, gates)`: rows that have moved, and gates, None where none came.

    Backward is the other way: a token's gradients are added over its picks in their order, so that the sum does not
    depend on where they went.
    """

    @staticmethod
    def forward(
        ctx: Any, handle: DispatchHandle, to_experts: bool, rows_ND: Tensor, gates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.handle, ctx.to_experts = handle, to_experts
        return handle.move(to_experts, rows_ND, gates)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.handle.move(not ctx.to_experts, *grads)


class DispatchHandle:
    """Destinations of the rows of one call, token by token."""

    # ids_NK: int64, the expert of each assignment
    def __init__(self, group: dist.ProcessGroup, cell: Cell, rows: CellRows, ids_NK: Tensor) -> None:
        self.rows, self._group, self._what, self._top_k = rows, group, f"tokens of {cell}", ids_NK.shape[1]
        ids_A = ids_NK.reshape(-1)
        # stable: the rows of an expert are summed in this order, the same on every device and in every run
        self._assignment = ids_A.argsort(stable=True).index_select(0, rows.send_permutation)
        self._token = self._assignment // self._top_k
        # the sent row of each assignment; where none is, the row of zeros behind what comes back
        num_sent = len(self._assignment)
        self._row_A = torch.full_like(ids_A, num_sent)
        self._row_A[self._assignment] = torch.arange(num_sent, device=ids_A.device)

    def dispatch(self, hidden_ND: Tensor, gates_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens: the rows computed here [N, D] in order of group, zeros for padding, and their gates [N]."""
        rows, gates = MoveRows.apply(self, True, hidden_ND, gates_NK)
        return rows, gates.view(-1)

    def combine(self, computed_ND: Tensor) -> Tensor:
        """Return results to their tokens, added up over the picks: [N, D], zeros for a pick that was not sent."""
        output: Tensor = MoveRows.apply(self, False, computed_ND, None)[0]
        return output

    def move(self, to_experts: bool, rows_ND: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Send rows and gates [N, K] to experts, or return them from there, gates [N, 1]."""
        rows = self.rows
        if to_experts:
            gates = None if gates is None else gates.reshape(-1, 1)
            sizes = rows.send_G, rows.receive_G
            arrived, beside = self._exchange(rows_ND, self._token, gates, self._assignment, *sizes)
            beside = None if beside is None else beside.index_select(0, rows.expert_permutation)
            return arrived.index_select(0, rows.expert_permutation), beside
        chosen = rows.return_permutation
        arrived, beside = self._exchange(rows_ND, chosen, gates, chosen, rows.receive_G, rows.send_G)
        if beside is not None:
            beside = beside.index_select(0, self._row_A).view(-1, self._top_k)
        picks = arrived.index_select(0, self._row_A)
        return picks.view(-1, self._top_k, picks.shape[1]).sum(dim=1), beside

    def _exchange(
        self,
        rows: Tensor,
        chosen: Tensor,
        gates: Tensor | None,
        chosen_gates: Tensor,
        send_G: list[int],
        receive_G: list[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Exchange chosen rows, [*, D] and their gates [*, 1] in one message; behind them is a row of zeros."""
        # D values, then the gate in as many columns as hold it, then padding. A float32 gate in front of bfloat16
        # values would have them begin at byte 4 of rows of odd strides, which a GPU loads by 2 or 4 bytes at once.
        width, size = rows.shape[1], rows.element_size()
        gate_columns = 0 if gates is None else -(-gates.element_size() // size)
        first = width + -width % max(1, gate_columns)  # a gate begins at a multiple of its own size
        end = first + gate_columns
        packed = rows.new_empty(len(chosen), end + -end % (ALIGNMENT // size))
        torch.index_select(rows, 0, chosen, out=packed[:, :width])
        if gates is not None:
            torch.index_select(gates, 0, chosen_gates, out=packed[:, first:end].view(gates.dtype)[:, :1])
        whole = _all_to_all(packed, send_G, receive_G, self._group, self._what, num_zeros=1)
        return whole[:, :width], None if gates is None else whole[:, first:end].view(gates.dtype)[:, :1]


class RowGroups(NamedTuple):
    """Rows in order of their group, each of which is computed with one expert's weights."""

    sizes: list[int]  # rows of every group
    ends: Tensor  # int32 [groups], on the device, the first row behind each


class CellRows(NamedTuple):
    """Destinations of the rows of one cell on this rank. Permutations are int64, on the device."""

    send_G: list[int]  # rows to every rank
    receive_G: list[int]  # rows from every rank
    home: RowGroups  # what the experts compute that live here
    replicas: RowGroups  # what the replicas here compute
    send_permutation: Tensor  # [rows sent], of the assignments sorted by expert
    expert_permutation: Tensor  # [rows computed], of the received rows; padding is the row of zeros behind them
    return_permutation: Tensor  # [rows received], of the computed rows
    group_of_row: Tensor  # int64 [rows computed]; replicas are counted on behind the homes
    places: Places | None = None  # where kernels send rows by them


def upload_rows(
    device: torch.device, schedules: Sequence[CellSchedule], *, with_permutations: bool = True
) -> list[CellRows]:
    """Bring the rows of several cells to the device, in one copy of each kind. The host does not wait for it.

    Where kernels order rows, their permutations, 32 bytes a row, are empty.
    """
    indices: Iterator[Tensor] = repeat(torch.empty(0, dtype=torch.int64, device=device))
    group_of_rows: Iterable[Tensor] = [next(indices)] * len(schedules)
    if with_permutations:
        segments = [
            runs for cell in schedules for runs in (cell.send_segments, cell.expert_segments, cell.return_segments)
        ]
        sizes = [int(runs[:, 1].sum()) for runs in segments]
        indices = iter(expand_segments(segments, sizes, device))
        of_groups = [np.stack([np.arange(len(cell.group_rows_S)), cell.group_rows_S], axis=1) for cell in schedules]
        group, length = joined_to_device(of_groups, device).unbind(1)
        num_computed = [int(cell.group_rows_S.sum()) for cell in schedules]
        group_of_rows = group.repeat_interleave(length, output_size=sum(num_computed)).split(num_computed)
    group_rows = [part for cell in schedules for part in np.split(cell.group_rows_S, [cell.num_home])]
    ends = joined_to_device([part.cumsum(dtype=np.int32) for part in group_rows], device)
    groups = map(RowGroups, (part.tolist() for part in group_rows), ends.split([len(part) for part in group_rows]))
    return [
        CellRows(
            send_G=cell.send_G.tolist(),
            receive_G=cell.receive_G.tolist(),
            home=next(groups),
            replicas=next(groups),
            send_permutation=next(indices),
            expert_permutation=next(indices),
            return_permutation=next(indices),
            group_of_row=group_of_row,
        )
        for cell, group_of_row in zip(schedules, group_of_rows, strict=True)
    ]


def expand_segments(
    segments: Sequence[NDArray[np.int64]], sizes: Sequence[int], device: torch.device
) -> tuple[Tensor, ...]:
    """Give the index of every row of the segments of a `CellSchedule`, int64, for each array of them."""
    total = sum(sizes)
    start, length = joined_to_device(segments, device).unbind(1)
    # Within a segment, the index and its position in the result rise together: their difference is one number.
    shift = start - (length.cumsum(0) - length)
    # with the size of the output, repeat_interleave does not ask the device for it
    every = shift.repeat_interleave(length, output_size=total) + torch.arange(total, device=device)
    parts: tuple[Tensor, ...] = every.split(list(sizes))
    return parts


class ExchangeRows(torch.autograd.Function):
    """`ExchangeRows.apply(rows_ND, send_G, receive_G, group, what)`: rows from all ranks, in order of rank."""

    # for a framework that has a dispatcher, whose bits are kept without a plan (docs/decisions/0014): it orders rows,
    # weighs and sums them as that does, where `MoveRows` keeps fewer rows for backward

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send_G: list[int], receive_G: list[int], group: dist.ProcessGroup, what: str
    ) -> Tensor:
        ctx.way_back = receive_G, send_G, group, f"gradients of {what}"
        return _all_to_all(rows, send_G, receive_G, group, what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], *ctx.way_back), None, None, None, None


class ReorderRows(torch.autograd.Function):
    """`ReorderRows.apply(rows_ND, order, inverse)`: rows in order of arrival as they are computed, or the way back.

    Both permutations are a cell's, and padding is a row of zeros. Backward reads by the inverse, where that of
    `index_select` would fill a buffer with zeros and add to it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return _in_order(rows, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _in_order(grads[0], ctx.inverse), None, None


def _in_order(rows: Tensor, order: Tensor) -> Tensor:
    if len(order) > len(rows):
        rows = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
    return rows.index_select(0, order)


def _all_to_all(
    rows: Tensor, send_G: list[int], receive_G: list[int], group: dist.ProcessGroup, what: str, num_zeros: int = 0
) -> Tensor:
    """Exchange rows with all ranks; `num_zeros` rows of zeros lie behind what arrives."""
    arrived = whole = rows.new_empty(sum(receive_G) + num_zeros, rows.shape[1])
    if num_zeros:
        arrived, zeros = whole.split([len(whole) - num_zeros, num_zeros])
        zeros.zero_()
    with collective_errors(what, group):
        dist.all_to_all_single(arrived, rows.contiguous(), receive_G, send_G, group=group)
    return whole


def gather_counts(group: dist.ProcessGroup, mine: Tensor, what: str) -> NDArray[np.int64]:
    """Gather counts [..., E] of every rank as int64 [..., G, E]. The host waits for them."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with collective_errors(f"the counts of {what}", group):
        dist.all_gather(parts, mine, group=group)
    found: NDArray[np.int64] = torch.stack(parts, dim=-2).cpu().numpy()
    return found

"""The rows of one call of a routed layer, sent to the ranks that serve them and back, through autograd.

`DispatchHandle` turns a `CellSchedule`, which is arithmetic on counts, into tokens. `Dispatch` sends rows to the ranks
that serve them and `Combine` brings results back: each is the other's transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer.peers import collective_errors
from foreroute.plan import CellSchedule


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
        top_k: K.
    """

    group: dist.ProcessGroup
    what: str
    send_G: list[int]
    receive_G: list[int]
    token_R: Tensor
    assignment_R: Tensor
    sent_row_A: Tensor
    top_k: int

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, what: str, rows: CellSchedule, ids_NK: Tensor, sent_N: Tensor | None
    ) -> DispatchHandle:
        """Turn every rank's share of every expert into tokens.

        Args:
            group: the ranks.
            what: the call in words.
            rows: how many go where.
            ids_NK: int64 [N, K], the expert of each assignment.
            sent_N: int64 [tokens sent], ascending; None for all N.
        """
        top_k = ids_NK.shape[1]
        ids_RK = ids_NK if sent_N is None else ids_NK.index_select(0, sent_N)
        by_expert = ids_RK.reshape(-1).argsort(stable=True)
        sent_R = by_expert.index_select(0, expand(rows.taken, ids_NK.device))
        token_R = sent_R // top_k if sent_N is None else sent_N.index_select(0, sent_R // top_k)
        assignment_R = token_R * top_k + sent_R % top_k
        sent_row_A = torch.full((ids_NK.numel(),), len(sent_R), dtype=torch.int64, device=ids_NK.device)
        sent_row_A[assignment_R] = torch.arange(len(sent_R), device=ids_NK.device)
        return cls(group, what, rows.send_G.tolist(), rows.receive_G.tolist(), token_R, assignment_R, sent_row_A, top_k)

    def out(self, sent: Tensor) -> Tensor:
        """[rows sent, D] to [rows received + 1, D], the last row of zeros."""
        return self._exchange(sent, self.send_G, self.receive_G)

    def back(self, received: Tensor) -> Tensor:
        """[rows received, D] to [rows sent + 1, D], the last row of zeros."""
        return self._exchange(received, self.receive_G, self.send_G)

    def _exchange(self, rows: Tensor, send_G: list[int], receive_G: list[int]) -> Tensor:
        # One more row, of zeros: what was not sent, and what pads a group, is taken from there.
        total = sum(receive_G)
        arrived = rows.new_empty(total + 1, rows.shape[1])
        arrived[total] = 0
        with collective_errors(self.what, self.group):
            dist.all_to_all_single(arrived[:total], rows.contiguous(), receive_G, send_G, group=self.group)
        return arrived


class Dispatch(torch.autograd.Function):
    """`Dispatch.apply(hidden_ND, handle)`: tokens to the ranks that serve them, [rows received + 1, D].

    A token's gradients are added over its picks in their order, so that the sum does not depend on where they went.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, handle: DispatchHandle) -> Tensor:
        ctx.handle = handle
        return handle.out(hidden_ND.index_select(0, handle.token_R))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        handle: DispatchHandle = ctx.handle
        picks = handle.back(grads[0][:-1]).index_select(0, handle.sent_row_A)
        return picks.view(-1, handle.top_k, picks.shape[1]).sum(dim=1), None


class Combine(torch.autograd.Function):
    """`Combine.apply(computed, handle)`: results back to their source, [N x K, D]; zeros for what was not sent."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, handle: DispatchHandle) -> Tensor:
        ctx.handle = handle
        return handle.back(computed).index_select(0, handle.sent_row_A)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        handle: DispatchHandle = ctx.handle
        return handle.out(grads[0].index_select(0, handle.assignment_R))[:-1], None


def expand(runs: NDArray[np.int64], device: torch.device) -> Tensor:
    """int64, the index of every row of every run of a `CellSchedule`; the device is not waited for."""
    total = int(runs[:, 1].sum())
    start_B, length_B = torch.from_numpy(runs).to(device, non_blocking=True).unbind(1)
    # Within a run, index and place in the result rise together: their difference is one number per run.
    shift_B = start_B - (length_B.cumsum(0) - length_B)
    return shift_B.repeat_interleave(length_B, output_size=total) + torch.arange(total, device=device)

"""Which rows a rank sends, receives and computes in one cell, and the sending itself, through autograd.

An *assignment* is one pick of one token. A rank sorts its assignments by expert, stable; the first of an expert go to
its home, the next to its replicas in ascending order of their rank, as many to each as the plan says. What is sent is
in order of (target rank, group); a *group* is what one rank computes with one expert's weights: its home experts in
ascending order of their id, then its replicas in ascending order of their slot. What is received is in order of
(source rank, group), what is computed in order of (group, source rank). So rows of a group are always in order of
(source rank, token, pick), whatever else is on the rank.

`DispatchPlan` is arithmetic on counts, with no token looked at; `DispatchHandle` turns it into tokens. `Dispatch` sends
rows to the ranks that serve them and `Combine` brings results back: each is the other's transpose.

Axis letters: G ranks, E experts, H hosts, S groups of this rank, B blocks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer import home_row_E
from foreroute.ep.transfer.peers import collective_errors
from foreroute.errors import PlanError
from foreroute.plan import CellHosts, CellPlan


@dataclass(frozen=True, eq=False)
class Blocks:
    """Runs of consecutive rows, in the order in which they are taken.

    Attributes:
        start_B: int64 [B], first row of each run.
        length_B: int64 [B].
    """

    start_B: NDArray[np.int64]
    length_B: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """How many rows of one rank go where in one cell, and in which order.

    Attributes:
        send_G: rows to each rank.
        receive_G: rows from each rank.
        taken: of this rank's assignments sorted by expert: those that are sent, in the order of sending.
        grouped: of the received rows: those that are computed, in that order. A run that starts at the number of
            received rows is padding.
        returned: of the computed rows: those that are sent back, in order of arrival.
        group_rows_S: int64 [S], rows of every group, padding included.
        num_home: how many groups are home experts; the others are replicas.
    """

    send_G: list[int]
    receive_G: list[int]
    taken: Blocks
    grouped: Blocks
    returned: Blocks
    group_rows_S: NDArray[np.int64]
    num_home: int

    @classmethod
    def of(cls, cell: CellPlan, counts_GE: NDArray[np.int64], rank: int, least_rows: int) -> DispatchPlan:
        """Read them off a plan and counts.

        Args:
            cell: homes and replicas.
            counts_GE: int64 [G, E], assignments of every rank to every expert.
            rank: whose rows.
            least_rows: a group with any row is padded to this many.

        Raises:
            PlanError: when replicas are to serve more assignments of an expert than there are.
        """
        hosts = CellHosts.of(cell, counts_GE)
        if (hosts.tokens_HG < 0).any():
            host, source = np.argwhere(hosts.tokens_HG < 0)[0].tolist()
            raise PlanError(
                f"replicas of expert {hosts.expert_H[host]} are to serve {-hosts.tokens_HG[host, source]} assignments "
                f"of rank {source} more than there are; the plan was made for other counts"
            )
        group_H = _groups(cell)
        here_S = np.flatnonzero(hosts.rank_H == rank)
        here_S = here_S[np.argsort(group_H[here_S])]
        tokens_SG = hosts.tokens_HG[here_S]
        num_home = int((cell.home_E == rank).sum())
        padding_S = _padding(tokens_SG.sum(axis=1), num_home, least_rows)
        grouped, returned = _computed(tokens_SG, padding_S)
        send_G = np.zeros(len(counts_GE), np.int64)
        np.add.at(send_G, hosts.rank_H, hosts.tokens_HG[:, rank])
        return cls(
            send_G.tolist(),
            tokens_SG.sum(axis=0).tolist(),
            _taken(hosts, group_H, rank),
            grouped,
            returned,
            tokens_SG.sum(axis=1) + padding_S,
            num_home,
        )


def _groups(cell: CellPlan) -> NDArray[np.int64]:
    """int64 [H], the group of every host on its rank."""
    num_home = len(cell.home_E) // (int(cell.home_E.max()) + 1)
    order = np.lexsort((cell.slot_R, cell.rank_R))
    # A replica's place in this order, less that of the first of its rank, is how many of its rank come before it.
    sorted_R = cell.rank_R[order]
    replica_R = np.empty(len(order), np.int64)
    replica_R[order] = num_home + np.arange(len(order)) - np.searchsorted(sorted_R, sorted_R)
    return np.concatenate([home_row_E(cell.home_E), replica_R])


def _taken(hosts: CellHosts, group_H: NDArray[np.int64], rank: int) -> Blocks:
    """Each host's share of this rank's assignments, by (target, group).

    Assignments sorted by expert are cut into one run per host, in the order of `by_expert`; sending takes the runs in
    the order of `by_target`.
    """
    mine_H = hosts.tokens_HG[:, rank]
    # `CellHosts` lists the home of every expert first, expert 0 to E - 1, and then the replicas
    is_replica_H = np.arange(len(mine_H)) > hosts.expert_H.max()
    by_expert = np.lexsort((hosts.rank_H, is_replica_H, hosts.expert_H))
    start_H = np.empty(len(mine_H), np.int64)
    start_H[by_expert] = _starts(mine_H[by_expert])
    by_target = np.lexsort((group_H, hosts.rank_H))
    return Blocks(start_H[by_target], mine_H[by_target])


def _padding(rows_S: NDArray[np.int64], num_home: int, least_rows: int) -> NDArray[np.int64]:
    """int64 [S], rows of zeros that each group is given beside its own."""
    padding_S = np.where(rows_S > 0, np.maximum(least_rows - rows_S, 0), 0)
    for part in (slice(0, num_home), slice(num_home, None)):
        # a grouped GEMM is never given an empty input
        if not rows_S[part].any():
            padding_S[part][:1] = max(least_rows, 1)
    return padding_S


def _computed(tokens_SG: NDArray[np.int64], padding_S: NDArray[np.int64]) -> tuple[Blocks, Blocks]:
    """From received to computed order, and back: the transpose of a (source rank, group) table of runs.

    Every group ends with its padding, which is taken from beyond the rows received and is not sent back.
    """
    num_groups, num_ranks = tokens_SG.shape
    arrived_GS = _starts(tokens_SG.T.reshape(-1)).reshape(num_ranks, num_groups)
    beyond_S = np.full(num_groups, tokens_SG.sum())
    starts = np.concatenate([arrived_GS.T, beyond_S[:, None]], axis=1)
    lengths = np.concatenate([tokens_SG, padding_S[:, None]], axis=1)
    computed = _starts(lengths.reshape(-1)).reshape(lengths.shape)[:, :num_ranks]
    return Blocks(starts.reshape(-1), lengths.reshape(-1)), Blocks(computed.T.reshape(-1), tokens_SG.T.reshape(-1))


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths) - lengths


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
        cls, group: dist.ProcessGroup, what: str, rows: DispatchPlan, ids_NK: Tensor, sent_N: Tensor | None
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
        return cls(group, what, rows.send_G, rows.receive_G, token_R, assignment_R, sent_row_A, top_k)

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


def expand(blocks: Blocks, device: torch.device) -> Tensor:
    """int64, the index of every row of every block; the device is not waited for."""
    total = int(blocks.length_B.sum())
    length_B = torch.from_numpy(blocks.length_B).to(device, non_blocking=True)
    start_B = torch.from_numpy(blocks.start_B).to(device, non_blocking=True)
    # Within a block, index and place in the result rise together: their difference is one number per block.
    shift_B = start_B - (length_B.cumsum(0) - length_B)
    return shift_B.repeat_interleave(length_B, output_size=total) + torch.arange(total, device=device)

"""Which rows a rank sends, receives and computes in one cell: arithmetic on counts, with no token looked at.

An *assignment* is one pick of one token. A rank sorts its assignments by expert, stable; the first of an expert go to
its home, the next to its replicas in ascending order of their rank, as many to each as the plan says. What is sent is
in order of (target rank, group); a *group* is what one rank computes with one expert's weights: its home experts in
ascending order of their id, then its replicas in ascending order of their slot. What is received is in order of
(source rank, group), what is computed in order of (group, source rank). So rows of a group are always in order of
(source rank, token, pick), whatever else is on the rank.

Axis letters: G ranks, E experts, H hosts, S groups of this rank, B blocks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import PlanError
from foreroute.plan import CellHosts, CellPlan
from foreroute.transfer import home_row_E


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
class CellRows:
    """The rows of one rank in one cell.

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
    def of(cls, cell: CellPlan, counts_GE: NDArray[np.int64], rank: int, least_rows: int) -> CellRows:
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


def home_alone(home_E: NDArray[np.int16]) -> CellPlan:
    """A cell in which every expert is served at its home alone."""
    none = np.zeros(0, np.int16)
    no_tokens = np.zeros((0, int(home_E.max()) + 1), np.int32)
    return CellPlan(home_E, none, none, none, np.zeros(0, np.bool_), no_tokens)


def _groups(cell: CellPlan) -> NDArray[np.int64]:
    """int64 [H], the group of every host on its rank."""
    num_home = len(cell.home_E) // (int(cell.home_E.max()) + 1)
    order = np.lexsort((cell.slot_R, cell.rank_R))
    sorted_R = cell.rank_R[order]
    replica_R = np.empty(len(order), np.int64)
    replica_R[order] = num_home + np.arange(len(order)) - np.searchsorted(sorted_R, sorted_R)
    return np.concatenate([home_row_E(cell.home_E), replica_R])


def _taken(hosts: CellHosts, group_H: NDArray[np.int64], rank: int) -> Blocks:
    """Each host's share of this rank's assignments, by (target, group)."""
    mine_H = hosts.tokens_HG[:, rank]
    is_replica_H = np.arange(len(mine_H)) > hosts.expert_H.max()
    by_expert = np.lexsort((hosts.rank_H, is_replica_H, hosts.expert_H))
    start_H = np.empty(len(mine_H), np.int64)
    start_H[by_expert] = _starts(mine_H[by_expert])
    by_target = np.lexsort((group_H, hosts.rank_H))
    return Blocks(start_H[by_target], mine_H[by_target])


def _padding(rows_S: NDArray[np.int64], num_home: int, least_rows: int) -> NDArray[np.int64]:
    padding_S = np.where(rows_S > 0, np.maximum(least_rows - rows_S, 0), 0)
    for part in (slice(0, num_home), slice(num_home, None)):
        # a grouped GEMM is never given an empty input
        if not rows_S[part].any():
            padding_S[part][:1] = max(least_rows, 1)
    return padding_S


def _computed(tokens_SG: NDArray[np.int64], padding_S: NDArray[np.int64]) -> tuple[Blocks, Blocks]:
    num_groups, num_ranks = tokens_SG.shape
    arrived_GS = _starts(tokens_SG.T.reshape(-1)).reshape(num_ranks, num_groups)
    beyond_S = np.full(num_groups, tokens_SG.sum())
    starts = np.concatenate([arrived_GS.T, beyond_S[:, None]], axis=1)
    lengths = np.concatenate([tokens_SG, padding_S[:, None]], axis=1)
    computed = _starts(lengths.reshape(-1)).reshape(lengths.shape)[:, :num_ranks]
    return Blocks(starts.reshape(-1), lengths.reshape(-1)), Blocks(computed.T.reshape(-1), tokens_SG.T.reshape(-1))


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths) - lengths

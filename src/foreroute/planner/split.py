"""From quotas to tokens: every host gets whole tokens, its own rank's and its node's first. Compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import NONE, inlined, routine
from foreroute.plan.hosts import Hosts
from foreroute.planner.cell import HELD, NEXT, QUOTA, RANK, CellState


@routine
def split(cell: CellState, counts_GE: NDArray[np.int32], hosts: Hosts, begin: int, local: bool) -> int:
    """Write the replicas of a cell into `hosts` from row `begin` on; returns the row behind the last.

    `local` as in `split_expert`. Quotas of experts with replicas are used up.
    """
    end = begin
    for e in range(cell.num_experts):
        first, x = end, cell.hosts[NEXT, e]
        while x != NONE:
            if cell.hosts[QUOTA, x]:
                hosts.expert_R[end], hosts.rank_R[end] = e, cell.hosts[RANK, x]
                hosts.slot_R[end] = (x - cell.num_experts) % cell.slots
                hosts.fetched_R[end] = cell.hosts[HELD, x] != e
                cell.split_3G[2, end - first] = cell.hosts[QUOTA, x]
                end += 1
            x = cell.hosts[NEXT, x]
        if end == first:
            continue
        hosts.tokens_RG[first:end] = 0
        left_G, home_G, quota_V = cell.split_3G[0], cell.split_3G[1], cell.split_3G[2]
        for g in range(len(left_G)):
            left_G[g] = counts_GE[g, e]
        home, quota = cell.hosts[RANK, e], cell.hosts[QUOTA, e]
        split_expert(
            hosts.rank_R, hosts.tokens_RG, first, end, quota_V, home, quota, left_G, home_G, cell.ranks_per_node, local
        )
    return end


@inlined
def split_expert(
    rank_R: NDArray[np.integer],
    tokens_RG: NDArray[np.integer],
    first: int,
    end: int,
    quota_V: NDArray[np.integer],
    home: int,
    home_quota: int,
    left_G: NDArray[np.integer],
    home_G: NDArray[np.integer],
    ranks_per_node: int,
    local: bool,
) -> None:
    """Share the tokens of one expert out to its replicas, rows `first` to `end` - 1; the home gets what is left.

    No replica serves more than its quota, which is used up. For given quotas no split keeps more assignments on their
    rank, nor on their node; `local` False shares them out in order, wherever they come from. The tokens of each source
    rank, `left_G`, are taken from and added to `tokens_RG`; `home_G` is scratch.
    """
    # Three rounds: own rank, own node, the rest. In the first two the home comes first, at the end it gets what is
    # left. Tokens never leave a rank or node while a host there has quota left.
    for reach in range(0 if local else 2, 3):
        size = 1 if reach == 0 else ranks_per_node if reach == 1 else len(left_G)
        if reach < 2:
            home_quota = take_near(home_G, left_G, home_quota, home, size)
        for r in range(first, end):
            quota_V[r - first] = take_near(tokens_RG[r], left_G, quota_V[r - first], int(rank_R[r]), size)


@inlined
def take_near(tokens_G: NDArray[np.integer], left_G: NDArray[np.integer], quota: int, rank: int, size: int) -> int:
    """Let a host serve tokens of the `size` ranks around it that have none yet; returns what is left of its quota."""
    begin = rank // size * size
    for g in range(begin, begin + size):
        if quota == 0:
            break
        taken = min(left_G[g], quota)
        tokens_G[g] += taken
        left_G[g] -= taken
        quota -= taken
    return quota

"""Compiled loops over flat arrays that fill the schedule of one rank, cell by cell. `plan.schedule` defines its order.

Axis letters: C cells of a block, G ranks, E experts, R replicas of a cell, S groups of this rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreroute.kernels import NONE, kernel
from foreroute.plan.hosts import Hosts

SOURCES_AT_ONCE = 16
"""int32 of a cache line."""


@kernel
def schedule_cells(rank: int, hosts: Hosts, counts_CGE: Any, memory_ranks: int, out: Any) -> tuple[int, int, int, int]:
    """Fill `out` for the cells of a block, whose layers are 0, 1, ... L - 1, 0, ...

    Returns cell, expert, source rank and excess of the first replicas that serve more than there is; or NONE.
    """
    home_LE, offsets, expert_R = hosts.home_LE, hosts.offsets, hosts.expert_R
    rank_R, slot_R, tokens_RG = hosts.rank_R, hosts.slot_R, hosts.tokens_RG
    num_cells, num_ranks, num_experts = counts_CGE.shape
    num_home = num_experts // num_ranks
    largest = 0
    for c in range(num_cells):
        largest = max(largest, offsets[c + 1] - offsets[c])
    home_row_E = np.empty(num_experts, np.int64)
    member_GS = np.empty((num_ranks, num_home), np.int64)
    order_R = np.empty(largest, np.int64)
    nth_R = np.empty(largest, np.int64)
    first_G = np.empty(num_ranks + 1, np.int64)
    served_GE = np.empty((num_ranks, num_experts), np.int32)
    start_E = np.empty(num_experts, np.int64)
    mine_E = np.empty(num_experts, np.int64)
    cursor_E = np.empty(num_experts, np.int64)
    start_R = np.empty(largest, np.int64)
    tokens_SG = np.empty((num_home + out.group_rows_CS.shape[1], num_ranks), np.int64)
    place_S = np.empty(num_home, np.int64)
    source_R = np.empty(largest, np.int64)
    target_R = np.empty(largest, np.int64)
    round_R = np.empty(largest, np.int64)
    place_R = np.empty(largest, np.int64)
    edge_at = np.empty((2, num_ranks, max(largest, 1)), np.int64)
    at = np.zeros(5, np.int64)
    for c in range(num_cells):
        home_E = home_LE[c % len(home_LE)]
        begin, num_replicas = offsets[c], offsets[c + 1] - offsets[c]
        counts_GE = counts_CGE[c]
        _by_home(home_E, home_row_E, member_GS)
        _by_rank_and_slot(rank_R, slot_R, begin, num_replicas, order_R, nth_R, first_G)

        # looked at on all ranks, so that all see what is wrong
        _served(expert_R, tokens_RG, begin, num_replicas, served_GE)
        g, e = _first_excess(served_GE, counts_GE)
        if g != NONE:
            return c, e, g, served_GE[g, e] - counts_GE[g, e]

        # this rank's assignments, sorted by expert: those of an expert go to its home first, then to its replicas
        place = 0
        for e in range(num_experts):
            mine_E[e] = counts_GE[rank, e] - served_GE[rank, e]
            start_E[e] = place
            cursor_E[e] = place + mine_E[e]
            place += counts_GE[rank, e]
        for i in range(num_replicas):
            r = order_R[i]  # in ascending order of rank
            e = expert_R[begin + r]
            start_R[r] = cursor_E[e]
            cursor_E[e] += tokens_RG[begin + r, rank]

        # they leave in order of (target rank, group)
        out.send_CG[c, :] = 0
        for g in range(num_ranks):
            for s in range(num_home):
                e = member_GS[g, s]
                at[0] = _append(out.send_segments, at[0], start_E[e], mine_E[e])
                out.send_CG[c, g] += mine_E[e]
            for i in range(first_G[g], first_G[g + 1]):
                r = order_R[i]
                at[0] = _append(out.send_segments, at[0], start_R[r], tokens_RG[begin + r, rank])
                out.send_CG[c, g] += tokens_RG[begin + r, rank]

        # groups of this rank
        num_groups = num_home + first_G[rank + 1] - first_G[rank]
        for s in range(num_home):
            e = member_GS[rank, s]
            for g in range(num_ranks):
                tokens_SG[s, g] = counts_GE[g, e] - served_GE[g, e]
        for i in range(first_G[rank], first_G[rank + 1]):
            tokens_SG[num_home + i - first_G[rank], :] = tokens_RG[begin + order_R[i], :]
        _computed(tokens_SG[:num_groups], num_home, c, out, at)

        # weights: from homes to replicas, and gradients back
        if num_replicas:
            for i in range(num_replicas):
                source_R[i] = home_E[expert_R[begin + order_R[i]]]
                target_R[i] = rank_R[begin + order_R[i]]
            sources, targets = source_R[:num_replicas], target_R[:num_replicas]
            num_rounds = colour_edges(sources, targets, edge_at, round_R)
            place_S[:] = 0
            # gradients come home in order of (row, peer), and replicas are in order of their rank already
            for i in range(num_replicas):
                row = home_row_E[expert_R[begin + order_R[i]]]
                if source_R[i] == rank and row + 1 < num_home:
                    place_S[row + 1] += 1
            for s in range(1, num_home):
                place_S[s] += place_S[s - 1]
            for i in range(num_replicas):
                row = home_row_E[expert_R[begin + order_R[i]]]
                if source_R[i] == rank:
                    place_R[i] = place_S[row]
                    place_S[row] += 1
            # in the order in which they are posted, as the sending and as the hosting end
            for turn in range(num_rounds):
                for end in range(2):
                    i = edge_at[end, rank, turn]
                    if i == NONE:
                        continue
                    r, peer_R = order_R[i], target_R if end == 0 else source_R
                    move = (out.sends if end == 0 else out.hosted)[at[3 + end]]
                    move.round, move.number = turn, i
                    move.expert = expert_R[begin + r]
                    move.row = home_row_E[move.expert]
                    move.peer, move.slot = peer_R[i], slot_R[begin + r]
                    move.position = place_R[i] if end == 0 else nth_R[r]
                    move.by_host = peer_R[i] // memory_ranks == rank // memory_ranks
                    at[3 + end] += 1
        out.ends_CX[c, :] = at
    return NONE, 0, 0, 0


@kernel(inline="always")
def _append(blocks: Any, at: int, start: int, length: int) -> int:
    """Append a segment of rows, unless it is empty."""
    if length == 0:
        return at
    blocks[at, 0] = start
    blocks[at, 1] = length
    return at + 1


@kernel
def _served(expert_R: Any, tokens_RG: Any, begin: int, num_replicas: int, served_GE: Any) -> None:
    """Count what replicas serve of every source: int32 [G, E]."""
    served_GE[:] = 0
    num_ranks = len(served_GE)
    # a few sources at a time, whose rows stay in the cache while all replicas write to them
    for begin_G in range(0, num_ranks, SOURCES_AT_ONCE):
        end_G = min(begin_G + SOURCES_AT_ONCE, num_ranks)
        for i in range(begin, begin + num_replicas):
            e = expert_R[i]
            for g in range(begin_G, end_G):
                served_GE[g, e] += tokens_RG[i, g]


@kernel
def _first_excess(served_GE: Any, counts_GE: Any) -> tuple[int, int]:
    """Find the first source and expert of which more is served than there is; NONE twice for none."""
    for g in range(len(served_GE)):
        has_excess = False
        for e in range(served_GE.shape[1]):
            has_excess |= served_GE[g, e] > counts_GE[g, e]
        if has_excess:
            for e in range(served_GE.shape[1]):
                if served_GE[g, e] > counts_GE[g, e]:
                    return g, e
    return NONE, NONE


@kernel
def _by_home(home_E: Any, home_row_E: Any, member_GS: Any) -> None:
    """List the experts of every rank in ascending order of their id, and the place of each."""
    num_S = np.zeros(len(member_GS), np.int64)
    for e in range(len(home_E)):
        g = home_E[e]
        home_row_E[e] = num_S[g]
        member_GS[g, num_S[g]] = e
        num_S[g] += 1


@kernel
def _by_rank_and_slot(
    rank_R: Any, slot_R: Any, begin: int, num_replicas: int, order_R: Any, nth_R: Any, first_G: Any
) -> None:
    """Order replicas by (rank, slot), and number those of each rank."""
    first_G[:] = 0
    for i in range(num_replicas):
        first_G[rank_R[begin + i] + 1] += 1
    for g in range(len(first_G) - 1):
        first_G[g + 1] += first_G[g]
    filled_G = first_G[:-1].copy()
    for i in range(num_replicas):
        g = rank_R[begin + i]
        j = filled_G[g]
        while j > first_G[g] and slot_R[begin + order_R[j - 1]] > slot_R[begin + i]:
            order_R[j] = order_R[j - 1]
            j -= 1
        order_R[j] = i
        filled_G[g] += 1
    for g in range(len(first_G) - 1):
        for i in range(first_G[g], first_G[g + 1]):
            nth_R[order_R[i]] = i - first_G[g]


@kernel
def _computed(tokens_SG: Any, num_home: int, c: int, out: Any, at: Any) -> None:
    """Transpose the (source rank, group) table of segments: from received to computed order, and back."""
    num_groups, num_ranks = tokens_SG.shape
    arrived_SG = np.empty((num_groups, num_ranks), np.int64)
    total = 0
    for g in range(num_ranks):
        before = total
        for s in range(num_groups):
            arrived_SG[s, g] = total
            total += tokens_SG[s, g]
        out.receive_CG[c, g] = total - before
    rows_S = out.group_rows_CS[c]
    any_home, any_replica = False, False
    for s in range(num_groups):
        rows_S[s] = tokens_SG[s].sum()
        any_home |= s < num_home and rows_S[s] > 0
        any_replica |= s >= num_home and rows_S[s] > 0
    # a grouped GEMM is never given an empty input: one row from beyond those received, which is not sent back
    if not any_home:
        rows_S[0] = 1
    if not any_replica and num_groups > num_home:
        rows_S[num_home] = 1
    out.num_groups_C[c] = num_groups
    place = 0
    computed_SG = np.empty((num_groups, num_ranks), np.int64)
    for s in range(num_groups):
        end = place + rows_S[s]
        for g in range(num_ranks):
            computed_SG[s, g] = place
            at[1] = _append(out.expert_segments, at[1], arrived_SG[s, g], tokens_SG[s, g])
            place += tokens_SG[s, g]
        at[1] = _append(out.expert_segments, at[1], total, end - place)
        place = end
    for g in range(num_ranks):
        for s in range(num_groups):
            at[2] = _append(out.return_segments, at[2], computed_SG[s, g], tokens_SG[s, g])


@kernel
def colour_edges(
    source_V: Any,  # integers [V]
    target_V: Any,  # integers [V]
    # int64 [2, G, at least as many as rounds], filled: a sender's and a receiver's edge of a round, or NONE
    edge_at: Any,
    round_V: Any,  # int64 [V], filled
) -> Any:
    """Colour the edges of a bipartite multigraph with as many colours as its largest degree; returns how many.

    An edge takes a round that is free at both ends; if there is none, the path that alternates between the round free
    at one end and that free at the other is flipped. Koenig's theorem: that many are enough, and fewer cannot be.
    """
    num_ranks = edge_at.shape[1]
    degree = np.zeros((2, num_ranks), np.int64)
    for v in range(len(source_V)):
        degree[0, source_V[v]] += 1
        degree[1, target_V[v]] += 1
    num_rounds = degree.max()
    edge_at[:, :, :num_rounds] = NONE
    path_V = np.empty(len(source_V), np.int64)
    # every edge so far has a round, and no two edges of a sender or of a receiver have the same
    for v in range(len(source_V)):
        ends = (source_V[v], target_V[v])
        free_out, free_in = 0, 0
        while edge_at[0, ends[0], free_out] != NONE:
            free_out += 1
        while edge_at[1, ends[1], free_in] != NONE:
            free_in += 1
        if free_out != free_in:
            # Flip the path that leaves the target in the round that is free at the source. It ends, because a vertex
            # has at most one edge in a round; and not at the source, which it could reach in the free round alone.
            free = (free_out, free_in)
            length, side, vertex = 0, 1, ends[1]
            while edge_at[side, vertex, free[length % 2]] != NONE:
                path_V[length] = edge_at[side, vertex, free[length % 2]]
                side = 1 - side
                vertex = source_V[path_V[length]] if side == 0 else target_V[path_V[length]]
                length += 1
            for j in range(length):
                edge_at[0, source_V[path_V[j]], free[j % 2]] = NONE
                edge_at[1, target_V[path_V[j]], free[j % 2]] = NONE
            for j in range(length):
                edge_at[0, source_V[path_V[j]], free[1 - j % 2]] = path_V[j]
                edge_at[1, target_V[path_V[j]], free[1 - j % 2]] = path_V[j]
        edge_at[0, ends[0], free_out] = v
        edge_at[1, ends[1], free_out] = v
    for g in range(num_ranks):
        for turn in range(num_rounds):
            if edge_at[0, g, turn] != NONE:
                round_V[edge_at[0, g, turn]] = turn
    return num_rounds

"""From quotas to tokens: quotas move to the nodes that the tokens come from, then every host gets whole tokens.

Moving quota at no cost in balance is a circulation of largest gain: an edge from rank a to rank b moves assignments of
an expert from its host on a to its host on b, and gains +1, 0 or -1 tokens that stay in their node for each. A rank may
always come to serve less, and more up to the target; so ranks are joined in a circle by one more node, the *slack*.
Circles of positive gain are found as Bellman and Ford do, and emptied, until there are none.
"""

from __future__ import annotations

from typing import Any

from foreroute.planner.cell import NONE, inlined, routine

FINEST = 192
"""Amounts below this part of the target are not worth a circle: half a percent of a rank's load."""
SEARCHES, SWEEPS = 12, 8
"""Most searches for circles, and passes over the edges in each. Both only bound the time: a search that finds nothing
is the last. What is left undone costs locality, not balance. All three are chosen by hand."""


@routine
def keep_local(cell: Any, target: Any) -> None:
    """Move quota so that more tokens stay in their node while no rank comes above the target."""
    num_nodes = len(cell.demand_NE)
    if num_nodes == 1:
        return
    _measure(cell)
    # Every circle keeps all quotas' sums by expert and no load above the target, so this may stop after any of them.
    least = 1 + target // FINEST
    for _ in range(SEARCHES):
        _forget(cell)
        any_sent = False
        # One sweep carries a gain along ascending ranks as far as it goes, the next along descending ones. For shortest
        # paths that halves the sweeps that may be needed (Yen, 1970).
        for sweep in range(SWEEPS):
            changed, sent = _relax(cell, target, least, sweep % 2 == 1)
            any_sent |= sent
            if not changed:
                break
        if not any_sent:
            return


@inlined
def _forget(cell: Any) -> None:
    """Begin the search anew. The slack is node G of it."""
    for node in range(len(cell.gain_V)):
        cell.gain_V[node] = 0
        cell.before_V[node] = NONE
    for rank in range(len(cell.load_G)):
        cell.queue_G[rank] = 1


@inlined
def _measure(cell: Any) -> None:
    """By how much the hosts of an expert in a node serve more than the node's own tokens: `over_NE`."""
    per_node = len(cell.load_G) // len(cell.demand_NE)
    for e in range(len(cell.demand_E)):
        if cell.next_H[e] == NONE:
            continue
        for n in range(len(cell.demand_NE)):
            cell.over_NE[n, e] = -cell.demand_NE[n, e]
        x = e
        while x != NONE:
            cell.over_NE[cell.rank_H[x] // per_node, e] += cell.quota_H[x]
            x = cell.next_H[x]


@inlined
def _edge(cell: Any, x: Any, y: Any, per_node: Any) -> Any:
    """Gain per assignment that moves from x to y, and how many of them have it."""
    e = cell.expert_H[x]
    width = cell.quota_H[x]
    near, far = cell.rank_H[x] // per_node, cell.rank_H[y] // per_node
    if near == far:
        return 0, width
    gain = 0
    over, under = cell.over_NE[near, e], -cell.over_NE[far, e]
    if over > 0:
        width = min(width, over)
    else:
        gain -= 1
    if under > 0:
        width = min(width, under)
        gain += 1
    return gain, width


@inlined
def _relax(cell: Any, target: Any, least: Any, backwards: Any) -> Any:
    """One pass over all edges: longer walks of more gain. Circles are emptied as they close.

    Returns:
        Whether any walk has come to gain more.
        Whether a circle was emptied.
    """
    num_experts = len(cell.demand_E)
    num_ranks = len(cell.load_G)
    per_rank = cell.home_GK.shape[1]
    slots = (len(cell.quota_H) - num_experts) // num_ranks
    per_node = num_ranks // len(cell.demand_NE)
    changed, sent = False, False
    for i in range(num_ranks):
        rank = num_ranks - 1 - i if backwards else i
        if cell.gain_V[num_ranks] > cell.gain_V[rank]:
            changed = True
            sent |= _extend(cell, num_ranks, rank, cell.gain_V[num_ranks], target, least)
        if cell.queue_G[rank] == 0:  # no walk to it has gained since its edges were last followed
            continue
        cell.queue_G[rank] = 0
        for k in range(per_rank + slots):
            x = cell.home_GK[rank, k] if k < per_rank else num_experts + rank * slots + k - per_rank
            e = cell.expert_H[x]
            if e == NONE or cell.quota_H[x] < least or cell.next_H[e] == NONE:
                continue
            # One bound for all edges of the expert: leaving a node that has none of it to spare loses one, arriving
            # gains one at most, so a walk reaches `most` + 1. Ranks that have more than `most` already are passed over.
            most = cell.gain_V[rank] - (cell.over_NE[rank // per_node, e] < least)
            if most < 0:
                continue
            y = e
            while y != NONE:
                to = cell.rank_H[y]
                if y != x and cell.gain_V[to] <= most:
                    gain, width = _edge(cell, x, y, per_node)
                    if width >= least and cell.gain_V[rank] + gain > cell.gain_V[to]:
                        cell.from_G[to], cell.to_G[to] = x, y
                        changed = True
                        sent |= _extend(cell, rank, to, cell.gain_V[rank] + gain, target, least)
                y = cell.next_H[y]
        if cell.gain_V[rank] > cell.gain_V[num_ranks] and target - cell.load_G[rank] >= least:
            changed = True
            sent |= _extend(cell, rank, num_ranks, cell.gain_V[rank], target, least)
    return changed, sent


@inlined
def _extend(cell: Any, node: Any, to: Any, gain: Any, target: Any, least: Any) -> Any:
    """Let the best walk to `to` come over `node`. When that closes a circle, empty it. True when it was emptied."""
    cell.gain_V[to] = gain
    cell.before_V[to] = node
    if to < len(cell.load_G):
        cell.queue_G[to] = 1
    # The chain of before_V has no circle but one that this edge closes: others were cut when they closed.
    at = node
    while at != NONE:
        if at == to:
            return _send(cell, to, target, least)
        at = cell.before_V[at]
    return False


@inlined
def _send(cell: Any, start: Any, target: Any, least: Any) -> Any:
    """Send as much around the circle through `start` as every edge takes, if it gains still, and cut the circle."""
    num_ranks = len(cell.load_G)
    per_node = num_ranks // len(cell.demand_NE)
    amount, total, at = target, 0, start
    while True:
        before = cell.before_V[at]
        if at == num_ranks:
            amount = min(amount, target - cell.load_G[before])
        elif before != num_ranks:
            gain, width = _edge(cell, cell.from_G[at], cell.to_G[at], per_node)
            total += gain
            amount = min(amount, width)
        at = before
        if at == start:
            break
    # Earlier circles have moved quota over the same edges: the gain that was added up along the walk may be gone.
    if total <= 0 or amount < least:
        amount = 0
    # From a rank to the slack: that rank keeps what it was given. From the slack to a rank: it gives and gets nothing.
    while True:
        before = cell.before_V[at]
        if at == num_ranks:
            cell.load_G[before] += amount
        elif before == num_ranks:
            cell.load_G[at] -= amount
        else:
            e = cell.expert_H[cell.from_G[at]]
            cell.quota_H[cell.from_G[at]] -= amount
            cell.quota_H[cell.to_G[at]] += amount
            cell.over_NE[before // per_node, e] -= amount
            cell.over_NE[at // per_node, e] += amount
        cell.before_V[at] = NONE
        cell.gain_V[at] = 0
        at = before
        if at == start:
            break
    return amount > 0


@routine
def split(
    cell: Any,
    counts_GE: Any,
    expert_R: Any,
    rank_R: Any,
    slot_R: Any,
    fetched_R: Any,
    tokens_RG: Any,
    row: Any,
    local: Any,
) -> Any:
    """Write the replicas of a cell from `row` on: each host serves its own rank first, then its node, then the rest.

    For given quotas no split keeps more assignments on their rank, nor on their node.

    Returns:
        The row after the last.
    """
    num_experts = len(cell.demand_E)
    num_ranks = len(cell.load_G)
    slots = (len(cell.quota_H) - num_experts) // num_ranks
    for e in range(num_experts):
        if cell.next_H[e] == NONE:
            continue
        first = row
        x = cell.next_H[e]
        while x != NONE:
            if cell.quota_H[x]:
                expert_R[row] = e
                rank_R[row] = cell.rank_H[x]
                slot_R[row] = x - num_experts - cell.rank_H[x] * slots
                fetched_R[row] = cell.held_H[x] != e
                row += 1
            x = cell.next_H[x]
        if row > first:
            _split_expert(cell, counts_GE, e, slots, rank_R, slot_R, tokens_RG, first, row, local)
    return row


@inlined
def _split_expert(
    cell: Any,
    counts_GE: Any,
    e: Any,
    slots: Any,
    rank_R: Any,
    slot_R: Any,
    tokens_RG: Any,
    first: Any,
    end: Any,
    local: Any,
) -> None:
    """Three rounds over the hosts. What is left after them is the home's."""
    num_experts = len(cell.demand_E)
    num_ranks = len(cell.load_G)
    per_node = num_ranks // len(cell.demand_NE)
    for g in range(num_ranks):
        cell.left_G[g] = counts_GE[g, e]
    # Own rank, own node, the rest; in the first two the home keeps its tokens before replicas take any. Tokens never
    # leave a rank or node while a host there has quota left, so no split with these quotas keeps more of them near.
    home, home_quota = cell.rank_H[e], cell.quota_H[e]
    if local:
        home_quota = _reserve(cell, home, home + 1, home_quota)
    for r in range(first, end):
        rank = rank_R[r]
        quota = cell.quota_H[num_experts + rank * slots + slot_R[r]]
        for g in range(num_ranks):
            tokens_RG[r, g] = 0
        if local:
            quota = _take(cell, tokens_RG, r, rank, rank + 1, quota)
        cell.width_G[r - first] = quota
    if local:
        _reserve(cell, home // per_node * per_node, (home // per_node + 1) * per_node, home_quota)
        for r in range(first, end):
            begin = rank_R[r] // per_node * per_node
            cell.width_G[r - first] = _take(cell, tokens_RG, r, begin, begin + per_node, cell.width_G[r - first])
    for r in range(first, end):
        _take(cell, tokens_RG, r, 0, num_ranks, cell.width_G[r - first])


@inlined
def _reserve(cell: Any, begin: Any, end: Any, quota: Any) -> Any:
    """Keep tokens of some ranks for the home. Returns the quota that is left."""
    for g in range(begin, end):
        kept = min(cell.left_G[g], quota)
        cell.left_G[g] -= kept
        quota -= kept
    return quota


@inlined
def _take(cell: Any, tokens_RG: Any, r: Any, begin: Any, end: Any, quota: Any) -> Any:
    """Give tokens of some ranks to the replica in row `r`. Returns the quota that is left."""
    for g in range(begin, end):
        if quota == 0:
            break
        take = min(cell.left_G[g], quota)
        tokens_RG[r, g] += take
        cell.left_G[g] -= take
        quota -= take
    return quota

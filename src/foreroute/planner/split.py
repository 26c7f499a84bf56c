"""From quotas to tokens: quotas move to the nodes that the tokens come from, then every host gets whole tokens.

Moving quota at no cost in balance is a circulation of largest gain: an edge from rank a to rank b moves assignments of
an expert from its host on a to its host on b, and gains +1, 0 or -1 tokens that stay in their node for each. A rank may
always come to serve less, and more up to the target; so ranks are joined in a circle by one more node, the *slack*.
Circles of positive gain are found as Bellman and Ford do, and emptied, until there are none.
"""

from __future__ import annotations

from typing import Any

from foreroute.planner.cell import EXPERT, HELD, NEXT, NONE, QUOTA, RANK, inlined, routine

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
    for node in range(len(cell.search)):
        cell.search[node].gain = 0
        cell.search[node].before = NONE
    for rank in range(len(cell.load_G)):
        cell.search[rank].queue = 1


@inlined
def _measure(cell: Any) -> None:
    """By how much the hosts of an expert in a node serve more than the node's own tokens: `over_NE`."""
    per_node = len(cell.load_G) // len(cell.demand_NE)
    for e in range(len(cell.demand_E)):
        if cell.hosts[NEXT, e] == NONE:
            continue
        for n in range(len(cell.demand_NE)):
            cell.over_NE[n, e] = -cell.demand_NE[n, e]
        x = e
        while x != NONE:
            cell.over_NE[cell.hosts[RANK, x] // per_node, e] += cell.hosts[QUOTA, x]
            x = cell.hosts[NEXT, x]


@inlined
def _edge(cell: Any, x: Any, y: Any, per_node: Any) -> Any:
    """Gain per assignment that moves from x to y, and how many of them have it."""
    e = cell.hosts[EXPERT, x]
    width = cell.hosts[QUOTA, x]
    near, far = cell.hosts[RANK, x] // per_node, cell.hosts[RANK, y] // per_node
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
    num_ranks = len(cell.load_G)
    per_node = num_ranks // len(cell.demand_NE)
    changed, sent = False, False
    for i in range(num_ranks):
        rank = num_ranks - 1 - i if backwards else i
        if cell.search[num_ranks].gain > cell.search[rank].gain:
            changed = True
            sent |= _extend(cell, num_ranks, rank, cell.search[num_ranks].gain, target, least)
        if cell.search[rank].queue == 0:  # no walk to it has gained since its edges were last followed
            continue
        cell.search[rank].queue = 0
        for k in range(cell.host_GK.shape[1]):
            x = cell.host_GK[rank, k]
            e = cell.hosts[EXPERT, x]
            if e == NONE or cell.hosts[QUOTA, x] < least or cell.hosts[NEXT, e] == NONE:
                continue
            # One bound for all edges of the expert: leaving a node that has none of it to spare loses one, arriving
            # gains one at most, so a walk reaches `most` + 1. Ranks that have more than `most` already are passed over.
            most = cell.search[rank].gain - (cell.over_NE[rank // per_node, e] < least)
            if most < 0:
                continue
            y = e
            while y != NONE:
                to = cell.hosts[RANK, y]
                if y != x and cell.search[to].gain <= most:
                    gain, width = _edge(cell, x, y, per_node)
                    if width >= least and cell.search[rank].gain + gain > cell.search[to].gain:
                        cell.search[to].from_host, cell.search[to].to_host = x, y
                        changed = True
                        sent |= _extend(cell, rank, to, cell.search[rank].gain + gain, target, least)
                y = cell.hosts[NEXT, y]
        if cell.search[rank].gain > cell.search[num_ranks].gain and target - cell.load_G[rank] >= least:
            changed = True
            sent |= _extend(cell, rank, num_ranks, cell.search[rank].gain, target, least)
    return changed, sent


@inlined
def _extend(cell: Any, node: Any, to: Any, gain: Any, target: Any, least: Any) -> Any:
    """Let the best walk to `to` come over `node`. When that closes a circle, empty it. True when it was emptied."""
    cell.search[to].gain = gain
    cell.search[to].before = node
    if to < len(cell.load_G):
        cell.search[to].queue = 1
    # The chain of `before` has no circle but one that this edge closes: others were cut when they closed.
    at = node
    while at != NONE:
        if at == to:
            return _send(cell, to, target, least)
        at = cell.search[at].before
    return False


@inlined
def _send(cell: Any, start: Any, target: Any, least: Any) -> Any:
    """Send as much around the circle through `start` as every edge takes, if it gains still, and cut the circle."""
    num_ranks = len(cell.load_G)
    per_node = num_ranks // len(cell.demand_NE)
    amount, total, at = target, 0, start
    while True:
        before = cell.search[at].before
        if at == num_ranks:
            amount = min(amount, target - cell.load_G[before])
        elif before != num_ranks:
            gain, width = _edge(cell, cell.search[at].from_host, cell.search[at].to_host, per_node)
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
        before = cell.search[at].before
        if at == num_ranks:
            cell.load_G[before] += amount
        elif before == num_ranks:
            cell.load_G[at] -= amount
        else:
            e = cell.hosts[EXPERT, cell.search[at].from_host]
            cell.hosts[QUOTA, cell.search[at].from_host] -= amount
            cell.hosts[QUOTA, cell.search[at].to_host] += amount
            cell.over_NE[before // per_node, e] -= amount
            cell.over_NE[at // per_node, e] += amount
        cell.search[at].before = NONE
        cell.search[at].gain = 0
        at = before
        if at == start:
            break
    return amount > 0


@routine
def split(cell: Any, counts_GE: Any, block: Any, row: Any, local: Any) -> Any:
    """Write the replicas of a cell from `row` on: each host serves its own rank first, then its node, then the rest.

    For given quotas no split keeps more assignments on their rank, nor on their node.

    Returns:
        The row after the last.
    """
    for e in range(len(cell.demand_E)):
        if cell.hosts[NEXT, e] == NONE:
            continue
        first = row
        x = cell.hosts[NEXT, e]
        while x != NONE:
            if cell.hosts[QUOTA, x]:
                rank = cell.hosts[RANK, x]
                block.expert_R[row], block.rank_R[row], block.slot_R[row] = e, rank, x - cell.slot_GS[rank, 0]
                block.fetched_R[row] = cell.hosts[HELD, x] != e
                row += 1
            x = cell.hosts[NEXT, x]
        if row > first:
            _split_expert(cell, counts_GE, e, block, first, row, local)
    return row


@inlined
def _split_expert(cell: Any, counts_GE: Any, e: Any, block: Any, first: Any, end: Any, local: Any) -> None:
    """Three rounds over the hosts: own rank, own node, the rest. What is left after them is the home's."""
    num_ranks = len(cell.load_G)
    for g in range(num_ranks):
        cell.search[g].left = counts_GE[g, e]
    for r in range(first, end):
        rank = block.rank_R[r]
        cell.search[r - first].width = cell.hosts[QUOTA, cell.slot_GS[rank, block.slot_R[r]]]
        for g in range(num_ranks):
            block.tokens_RG[r, g] = 0
    home, home_quota = cell.hosts[RANK, e], cell.hosts[QUOTA, e]
    # In the first two the home keeps its tokens before replicas take any. Tokens never leave a rank or node while a
    # host there has quota left, so no split with these quotas keeps more of them near.
    for reach in range(0 if local else 2, 3):
        size = 1 if reach == 0 else num_ranks // len(cell.demand_NE) if reach == 1 else num_ranks
        if reach < 2:
            begin = home // size * size
            for g in range(begin, begin + size):
                kept = min(cell.search[g].left, home_quota)
                cell.search[g].left -= kept
                home_quota -= kept
        for r in range(first, end):
            begin, quota = block.rank_R[r] // size * size, cell.search[r - first].width
            for g in range(begin, begin + size):
                if quota == 0:
                    break
                taken = min(cell.search[g].left, quota)
                block.tokens_RG[r, g] += taken
                cell.search[g].left -= taken
                quota -= taken
            cell.search[r - first].width = quota

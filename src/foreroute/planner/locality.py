"""Tokens that stay in their node: quotas move between the hosts of an expert at no cost in balance. Compiled.

A move takes assignments of one expert from its host on rank a to its host on rank b; for each of them +1, 0 or -1
tokens more stay in their node. Balance is kept by moves in a circle of ranks, each of which gives as much as it gets. A
rank may also come to serve less, and more up to the target; so one more vertex, the *slack*, takes from any rank and
gives to ranks below the target. Circles of positive gain are found as Bellman and Ford do, and emptied, until there are
none: then no moves keep more tokens in their node (a circulation of largest gain).
"""

from __future__ import annotations

from foreroute.kernels import NONE, inlined, routine
from foreroute.planner.cell import EXPERT, NEXT, QUOTA, RANK, CellState

# The three values are chosen by hand. What is said of others was seen on G64 with slots that persist, at 4 layers.
FINEST = 192
"""Amounts below this part of the target are not worth a circle: half a percent of a rank's load. 48 leaves 0.4 points
more there, and planning takes 0.75 of the time; 768 leaves 0.1 fewer and takes 1.16."""
SEARCHES, SWEEPS = 12, 4
"""Most searches for circles, and passes over the edges in each. Both only bound the time: a search that finds nothing
is the last. What is left undone costs locality, not balance. 8 sweeps keep up to 0.4 points more tokens in their node,
and planning takes 1.3 times as long; 2 sweeps of 24 searches leave 0.9 to 1.9 more that cross, in 0.7 of the time."""


@routine
def keep_local(cell: CellState, target: int) -> None:
    """Move quota so that more tokens stay in their node while no rank comes above the target."""
    if len(cell.demand_NE) == 1:
        return
    _measure(cell)
    # Every circle keeps all quotas' sums by expert and no load above the target, so this may stop after any of them.
    least = 1 + target // FINEST
    for _ in range(SEARCHES):
        for vertex in range(len(cell.search)):  # the ranks, and the slack as vertex G
            cell.search[vertex].gain, cell.search[vertex].before, cell.search[vertex].waiting = 0, NONE, 1
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


@routine
def serve_near(cell: CellState, target: int) -> None:
    """Let slots serve experts of overloaded homes that they hold, as far as tokens come from the slot's node.

    The search for replicas would take any slot that holds one, and leave it to `keep_local` to find out which is near.
    """
    for x in range(cell.num_experts, cell.hosts.shape[1]):
        e = cell.hosts[EXPERT, x]
        if e == NONE:
            continue
        home, rank = cell.hosts[RANK, e], cell.hosts[RANK, x]
        node = rank // cell.ranks_per_node
        if home // cell.ranks_per_node == node:
            continue
        near = cell.demand_NE[node, e]
        y = cell.hosts[NEXT, e]
        while y != NONE:
            if cell.hosts[RANK, y] // cell.ranks_per_node == node:
                near -= cell.hosts[QUOTA, y]
            y = cell.hosts[NEXT, y]
        amount = min(min(near, cell.hosts[QUOTA, e]), min(cell.load_G[home] - target, target - cell.load_G[rank]))
        if amount > 0:
            cell.hosts[QUOTA, e] -= amount
            cell.hosts[QUOTA, x] += amount
            cell.load_G[home] -= amount
            cell.load_G[rank] += amount


@inlined
def _measure(cell: CellState) -> None:
    """By how much the hosts of an expert in a node serve more than the node's own tokens: `over_NE`."""
    for e in range(cell.num_experts):
        if cell.hosts[NEXT, e] == NONE:
            continue
        for n in range(len(cell.demand_NE)):
            cell.over_NE[n, e] = -cell.demand_NE[n, e]
        x = e
        while x != NONE:
            cell.over_NE[cell.hosts[RANK, x] // cell.ranks_per_node, e] += cell.hosts[QUOTA, x]
            x = cell.hosts[NEXT, x]


@inlined
def _edge(cell: CellState, x: int, y: int) -> tuple[int, int]:
    """Gain per assignment that moves from x to y, and how many of them have it."""
    e = cell.hosts[EXPERT, x]
    width = cell.hosts[QUOTA, x]
    near, far = cell.hosts[RANK, x] // cell.ranks_per_node, cell.hosts[RANK, y] // cell.ranks_per_node
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
def _relax(cell: CellState, target: int, least: int, backwards: bool) -> tuple[bool, bool]:
    """Follow all edges to longer walks of more gain; say whether any walk gained more, and whether a circle closed."""
    num_ranks = len(cell.load_G)
    changed, sent = False, False
    for i in range(num_ranks):
        rank = num_ranks - 1 - i if backwards else i
        if cell.search[num_ranks].gain > cell.search[rank].gain:
            changed = True
            sent |= _extend(cell, num_ranks, rank, cell.search[num_ranks].gain, target, least)
        if cell.search[rank].waiting == 0:  # no walk to it has gained since its edges were last followed
            continue
        cell.search[rank].waiting = 0
        for k in range(cell.host_GK.shape[1]):
            x = cell.host_GK[rank, k]
            e = cell.hosts[EXPERT, x]
            if e == NONE or cell.hosts[QUOTA, x] < least or cell.hosts[NEXT, e] == NONE:
                continue
            # One bound for all edges of the expert: leaving a node that has none of it to spare loses one, arriving
            # gains one at most, so a walk reaches `most` + 1. Ranks that have more than `most` already are passed over.
            most = cell.search[rank].gain - (cell.over_NE[rank // cell.ranks_per_node, e] < least)
            if most < 0:
                continue
            y = e
            while y != NONE:
                to = cell.hosts[RANK, y]
                if y != x and cell.search[to].gain <= most:
                    gain, width = _edge(cell, x, y)
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
def _extend(cell: CellState, vertex: int, to: int, gain: int, target: int, least: int) -> bool:
    """Let the best walk to `to` come over `vertex`. When that closes a circle, empty it. True when it was emptied."""
    cell.search[to].gain = gain
    cell.search[to].before = vertex
    if to < len(cell.load_G):
        cell.search[to].waiting = 1
    # The chain of `before` has no circle but one that this edge closes: others were cut when they closed.
    at = vertex
    while at != NONE:
        if at == to:
            return _send(cell, to, target, least)
        at = cell.search[at].before
    return False


@inlined
def _send(cell: CellState, start: int, target: int, least: int) -> bool:
    """Send as much around the circle through `start` as every edge takes, if it gains still, and cut the circle."""
    num_ranks = len(cell.load_G)
    amount, total, at = target, 0, start
    while True:
        before = cell.search[at].before
        if at == num_ranks:
            amount = min(amount, target - cell.load_G[before])
        elif before != num_ranks:
            gain, width = _edge(cell, cell.search[at].from_host, cell.search[at].to_host)
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
            cell.over_NE[before // cell.ranks_per_node, e] -= amount
            cell.over_NE[at // cell.ranks_per_node, e] += amount
        cell.search[at].before = NONE
        cell.search[at].gain = 0
        at = before
        if at == start:
            break
    return amount > 0

"""The search for replicas: one call plans a block of micro-steps of some layers, cell by cell in execution order.

A cell is first served at home, then *grown*: a replica is added across each minimum cut until every rank is at the
target. A cell that misses the target is grown again from perturbed states; one that reaches it sheds the replicas that
it can do without. Then its quotas become tokens (`split`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import NONE, inlined, kernel, next_unit, routine
from foreroute.plan.hosts import Hosts
from foreroute.planner.cell import (
    BEST_EXPERT,
    BEST_QUOTA,
    EXPERT,
    HELD,
    QUOTA,
    RANK,
    CellState,
    all_slots,
    begin_cell,
    clear,
    relink,
    restore_held,
)
from foreroute.planner.flow import grow, heaviest
from foreroute.planner.locality import keep_local, serve_near
from foreroute.planner.split import split

# None of these values is published. They steer a search whose result is checked against the target, so they decide how
# many replicas and how much time it takes, never whether a plan is right. `benchmarks/planner.py` shows both. What is
# said of other values was seen on the workloads G8 and G32, at 3 layers and 16 micro-steps.
REUSE_THRESHOLD = 0.9
"""With slots that persist, replicas that move this share of the most that one can move are weighed by their later use.
At 1, later use breaks ties alone; lower values take more replicas in this cell to spare some in later ones. In steps as
short as these 1 fetched 1 to 18 % less."""
ATTEMPTS, FEWEST_ATTEMPTS = 1600, 12
"""Most attempts at a cell that misses its target are `ATTEMPTS` / G on G ranks, since each takes longer the more ranks
there are; at least `FEWEST_ATTEMPTS`. With 400, exact cells of 8 ranks and one slot are 1.012 of the mean instead of
1.011, in 40 % of the time."""
PERTURBED_SHARE = 0.3
"""Share of the best state's replicas that an attempt takes out. 0.6 does as well."""
THRESHOLD_SPREAD = 0.7
"""An attempt takes replicas that move `1 - THRESHOLD_SPREAD` to 1 of the most that one can move, evenly drawn.
With 0.2 such cells are 1.014 of the mean."""
CHOICE_NOISE = 0.3
"""Most that chance adds to a replica's score in an attempt, over what it must move. With 0 they are 1.014 too."""
THINNING_ROUNDS = 6
"""Attempts at a balanced cell with fewer replicas; each takes half of them out. Without, up to 2 % more are fetched."""


@kernel(_nrt=False)
def plan_block(
    cell: CellState,
    counts_MLGE: NDArray[np.int32],
    hosts: Hosts,
    figures_C2: NDArray[np.int64],
    held_LH: NDArray[np.int32],
    place: tuple[int, int, int, int],
    tolerance: float,
    locality: bool,
) -> None:
    """Plan some cells of a step into `hosts`, which has the micro-steps before of the same layers, as `cell` has.

    `figures_C2` gets what the slowest rank of each cell serves, and serves at least. `held_LH`, int32 [L, H], is what
    slots hold where they are persistent. `place` has micro-steps from the first number to before the second, and
    layers from the third to before the fourth.
    """
    c = place[0] * (place[3] - place[2])
    for m in range(place[0], place[1]):
        for layer in range(place[2], place[3]):
            cell.position[0], cell.position[1] = m, layer
            # the number of the cell and nothing else, so that plans do not depend on threads and blocks
            cell.random[0] = m * counts_MLGE.shape[1] + layer
            counts_GE = counts_MLGE[m, layer]
            total = begin_cell(cell, counts_GE, hosts.home_LE[layer - place[2]], held_LH[layer])
            figures_C2[c, 1] = least_load(cell)
            target = int(-((-total * (1.0 + tolerance)) // len(cell.load_G)))  # mean and tolerance, rounded up
            if cell.persistent and locality:
                serve_near(cell, target)
            reached = find_replicas(cell, target, tolerance > 0.0)
            restore_held(cell)
            if locality:
                keep_local(cell, reached)
            if cell.persistent:
                # A slot that serves nothing was not filled: it still holds what it held.
                for x in all_slots(cell):
                    if cell.hosts[QUOTA, x]:
                        held_LH[layer, x] = cell.hosts[EXPERT, x]
            figures_C2[c, 0] = cell.load_G[heaviest(cell.load_G)]
            hosts.offsets[c + 1] = split(cell, counts_GE, hosts, hosts.offsets[c], locality)
            c += 1


@routine
def least_load(cell: CellState) -> int:
    """Bound what the slowest rank of a cell serves under any plan of these homes and slots, before any is grown."""
    # If no rank serves more than T, then (1) T is the mean at least, rounded up; (2) a host of an expert serves T of
    # its assignments at most, so that an expert needs ceil(load / T) hosts; (3) what a rank's experts have beyond T
    # goes to replicas, each of which takes T at most, and no more than the heaviest of these experts has. By (2) and
    # (3) every rank's experts need a number of replicas; together they have as many as there are redundant slots. The
    # smallest T that (1) to (3) allow is found by bisection.
    total, most, num_ranks = 0, 0, len(cell.load_G)
    for g in range(num_ranks):
        total += cell.load_G[g]
        most = max(most, cell.load_G[g])
        cell.search[g].width = 0  # the load of the rank's heaviest expert
    for e in range(cell.num_experts):
        rank = cell.hosts[RANK, e]
        cell.search[rank].width = max(cell.search[rank].width, cell.hosts[QUOTA, e])
    # invariant: `least` - 1 is too little, `most` is enough: with every expert at its home alone
    least = -(-total // num_ranks)
    while least < most:
        middle = (least + most) // 2
        if _replicas_needed(cell, middle) <= num_ranks * cell.slots:
            most = middle
        else:
            least = middle + 1
    return least


@inlined
def _replicas_needed(cell: CellState, most: int) -> int:
    """Replicas without which some rank serves more than `most`, which is 1 at least: a lower bound of their number."""
    for g in range(len(cell.load_G)):
        cell.search[g].back_width = 0  # replicas that the rank's experts need by themselves
    for e in range(cell.num_experts):
        if cell.hosts[QUOTA, e] > most:
            cell.search[cell.hosts[RANK, e]].back_width += (cell.hosts[QUOTA, e] - 1) // most
    needed = 0
    for g in range(len(cell.load_G)):
        crowded, over = cell.search[g].back_width, cell.load_G[g] - most
        if over > 0:
            crowded = max(crowded, -(-over // min(most, cell.search[g].width)))
        needed += crowded
    return needed


@routine
def find_replicas(cell: CellState, target: int, tolerant: bool) -> int:
    """Bring every rank to the target, or as near as is found, with few fetched replicas.

    Returns:
        The target, or the least larger one that was reached.
    """
    reached = _attempt(cell, target)
    restore_held(cell)
    if reached == target and tolerant:
        # Empty slots cost a fetch for every replica, so fewer are searched for; of kept ones only the fetched cost.
        if cell.persistent:
            _drop_spare(cell, target)
        else:
            _thin_out(cell, target)
    return reached


@routine
def _attempt(cell: CellState, target: int) -> int:
    """Grow; where that misses the target, again without replicas in the way, then from perturbed best states."""
    threshold = REUSE_THRESHOLD if cell.persistent else 1.0
    best = grow(cell, target, True, threshold, 0.0)
    if best <= target:
        return best
    _save_best(cell)
    # The best state is the one with the least target reached; equal ones replace it, so that the search drifts on.
    for attempt in range(max(ATTEMPTS // len(cell.load_G), FEWEST_ATTEMPTS)):
        # replicas with less than a tenth of a rank's load (chosen by hand) take slots that others need
        if attempt == 0:
            _take_out(cell, target // 10, 0.0)
        elif attempt == 1:  # from empty slots, but for those that serve more than a rank should
            _take_out(cell, target + 1, 0.0)
        else:
            _restore_best(cell)
            _take_out(cell, 1, PERTURBED_SHARE)
            threshold = 1.0 - THRESHOLD_SPREAD * next_unit(cell.random)
        reached = grow(cell, target, True, threshold, CHOICE_NOISE)
        if reached <= best:
            best = reached
            _save_best(cell)
            if best <= target:
                return best
    _restore_best(cell)
    return best


@routine
def _thin_out(cell: CellState, target: int) -> None:
    """Take half of the replicas out and add anew, as long as that needs no more of them."""
    _save_best(cell)
    fewest = _fetched(cell)
    for _ in range(THINNING_ROUNDS):
        _take_out(cell, 1, 0.5)
        if grow(cell, target, True, 1.0, CHOICE_NOISE) <= target and _fetched(cell) <= fewest:
            fewest = _fetched(cell)
            _save_best(cell)
        else:
            _restore_best(cell)


@routine
def _fetched(cell: CellState) -> int:
    """How many replicas serve something and were not in their slot when the cell began."""
    count = 0
    for x in all_slots(cell):
        count += cell.hosts[QUOTA, x] > 0 and cell.hosts[HELD, x] != cell.hosts[EXPERT, x]
    return count


@routine
def _drop_spare(cell: CellState, target: int) -> None:
    """Do without the fetched replicas that the others can make up for, those that serve least first."""
    _save_best(cell)
    # The best state always reaches the target. Replicas that serve `least` or less were tried and are needed; after a
    # success all are tried again, for quotas have moved.
    least = 0
    while True:
        host, quota = NONE, 0
        for x in all_slots(cell):
            served = cell.hosts[BEST_QUOTA, x]
            if served <= least or cell.hosts[HELD, x] == cell.hosts[BEST_EXPERT, x]:
                continue
            if host == NONE or served < quota:
                host, quota = x, served
        if host == NONE:
            break
        least = quota
        clear(cell, host)
        if grow(cell, target, False, 1.0, 0.0) <= target:
            _save_best(cell)
            least = 0
        else:
            _restore_best(cell)


@routine
def _save_best(cell: CellState) -> None:
    for x in range(cell.hosts.shape[1]):
        cell.hosts[BEST_QUOTA, x] = cell.hosts[QUOTA, x]
    for x in all_slots(cell):
        cell.hosts[BEST_EXPERT, x] = cell.hosts[EXPERT, x]


@routine
def _restore_best(cell: CellState) -> None:
    for x in range(cell.hosts.shape[1]):
        cell.hosts[QUOTA, x] = cell.hosts[BEST_QUOTA, x]
    for x in all_slots(cell):
        cell.hosts[EXPERT, x] = cell.hosts[BEST_EXPERT, x]
    relink(cell)


@routine
def _take_out(cell: CellState, least: int, share: float) -> None:
    """Empty the slots that serve less than `least`, and a share of the others, drawn by lot."""
    for x in all_slots(cell):
        if cell.hosts[EXPERT, x] == NONE:
            continue
        if cell.hosts[QUOTA, x] < least or (share > 0.0 and next_unit(cell.random) < share):
            clear(cell, x)

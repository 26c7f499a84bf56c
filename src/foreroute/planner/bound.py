"""A lower bound: assignments that the slowest rank of a cell serves at least, with given homes and redundant slots."""

from __future__ import annotations

from foreroute.kernels import inlined, routine
from foreroute.planner.cell import QUOTA, RANK, CellState


@routine
def least_load(cell: CellState) -> int:
    """What no plan of these homes and slots can beat, whatever it replicates and however it splits.

    If no rank serves more than T, then (1) T is the mean at least, rounded up; (2) a host of an expert serves T of its
    assignments at most, so that an expert needs ceil(load / T) hosts; (3) what a rank's experts have beyond T goes to
    replicas, each of which takes T at most, and no more than the heaviest of these experts has. By (2) and (3) every
    rank's experts need a number of replicas; together they have as many as there are redundant slots.

    The cell is as `begin_cell` leaves it; the answer is the smallest T that (1) to (3) allow.
    """
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

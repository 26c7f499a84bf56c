"""One cell in NumPy: which experts get replicas where, and how much of its load every host serves.

This is the search of the compiled planner, written to be read. Both give the same, bit for bit, where ranks share a
node, slots are empty when a cell begins, and ranks are to be as level as slots allow: that is `plan` with
`PlanOptions(tolerance=0, slots="shared")` and without a cost model.

Load can flow from rank a to rank b when an expert that serves on a has a host on b: its home, or a slot with a replica.
A round takes the heaviest rank above the target.

1. If a path leads from it to a rank below the target, load flows along it.
2. Otherwise the ranks that it reaches are one side of a minimum cut, and only a replica across the cut helps: the one
   that moves most, to the rank below the target with the least room to spare, or to one that can pass the load on.
3. Where no such rank has a free slot, the slot is emptied whose place serves best.
4. Where there is none, those ranks serve each other's experts alone: the target becomes their mean.

A cell that missed its target is searched again from perturbed states. Bisection then finds the least largest load that
the replicas allow. G ranks, E experts, S slots of a rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator
from operator import index, itemgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import as_array, whole_number
from foreroute.errors import CountsError, TopologyError
from foreroute.kernels import NONE
from foreroute.plan.counts import check_counts
from foreroute.plan.topology import MOST_RANKS, MOST_REDUNDANT_SLOTS, check_homes

Integers = NDArray[np.int64]
Seen = dict[int, tuple[int, int, int]]
"""Ranks that a search saw, in order: how much load can reach each, the rank before it, and the expert it comes by."""


def plan_cell(loads: ArrayLike, homes: ArrayLike, slots: int, *, seed: int = 0) -> Integers:
    """Level the ranks of one cell by replicas: int64 [G, E], assignments to each expert that each rank serves.

    Columns add up to `loads`. What is not 0 away from an expert's home is a replica, `slots` of a rank at most.

    Args:
        loads: integers [E] from 0 on, assignments to each expert; 2,147,483,647 in all at most.
        homes: integers [E], the rank that each expert lives on; E / G experts on every rank.
        slots: of each rank, as many as a `Topology` may have.
        seed: of perturbations; `plan` takes the number of the cell in the step, m * L + layer.

    Raises:
        CountsError: when loads or slots are not that.
        TopologyError: when homes are not.
    """
    loads_E = as_array(loads, name="loads", error=CountsError)
    if loads_E.ndim != 1 or not loads_E.size:
        raise CountsError(f"loads are {loads_E.dtype} of shape {loads_E.shape}; expected integers [E]")
    [[[loads_E]]] = check_counts(loads_E[None, None, None])
    homes_E = as_array(homes, name="homes", error=TopologyError)
    # homes that are none are refused below, as are more ranks than experts
    highest = int(homes_E.max()) if homes_E.size and homes_E.dtype.kind in "iu" else 0
    num_ranks = min(max(1 + highest, 1), len(loads_E))
    [home_E] = check_homes(homes_E[None], 1, len(loads_E), num_ranks).astype(np.int64)
    most_slots = min(MOST_RANKS, MOST_REDUNDANT_SLOTS // num_ranks)
    slots = whole_number(slots, name="slots", least=0, most=most_slots, error=CountsError)
    cell = _Cell(loads_E, home_E, num_ranks, slots, seed)
    target = _least_load(cell.quota_GE, slots)
    reached = _search(cell, target)
    cell.take_out(1)
    best = cell.saved()
    while target < reached:
        middle = (target + reached) // 2
        if _level_ranks(cell, middle, adding=False) <= middle:
            reached, best = middle, cell.saved()
        else:
            target = middle + 1
            cell.restore(best)
    return cell.quota_GE


def _least_load(quota_GE: Integers, slots: int) -> int:
    """Return the least load of the slowest rank: the smallest T, from the mean on, whose replicas have slots."""
    load_G, heaviest_G = quota_GE.sum(axis=1), quota_GE.max(axis=1)

    def has_slots(most: int) -> bool:
        # no host serves more than T, nor a replica more than its rank's heaviest expert has
        by_expert_G = (np.maximum(quota_GE - 1, 0) // most).sum(axis=1)
        by_rank_G = -(np.minimum(most - load_G, 0) // np.clip(heaviest_G, 1, most))
        return bool(np.maximum(by_expert_G, by_rank_G).sum() <= len(load_G) * slots)

    mean = -(-int(load_G.sum()) // len(load_G))
    return mean + bisect_left(range(mean, int(load_G.max())), True, key=has_slots)


def _search(cell: _Cell, target: int) -> int:
    """Level, from perturbed states while the target is missed; returns it, or the least larger one that was reached."""
    reached = _level_ranks(cell, target)
    best, last, i = cell.saved(), 0, 0
    while reached > target and i < last + max(3000 // (len(cell.hosts_E) + cell.slot_GS.size), 20):
        threshold = 1.0
        if i < 2:  # without replicas in the way of others: small ones, and then all but those above the target
            cell.take_out((target // 10, target + 1)[i])
        else:
            cell.restore(best)
            cell.take_out(1, share=0.3)
            threshold = 1.0 - 0.7 * next(cell.units)
        found = _level_ranks(cell, target, threshold=threshold, noise=0.3)
        if found <= reached:  # an equal state too, so that the search drifts on
            reached, last, best = found, i if found < reached else last, cell.saved()
        i += 1
    cell.restore(best)
    return reached


def _level_ranks(cell: _Cell, target: int, *, adding: bool = True, threshold: float = 1.0, noise: float = 0.0) -> int:
    """Bring every rank to the target, or to the least larger one that is found, which is returned."""
    evictions = 2 * len(cell.slot_GS)
    while True:
        load_G = cell.quota_GE.sum(axis=1)
        start = int(load_G.argmax())
        if load_G[start] <= target:
            return target
        seen: Seen = {start: (int(load_G[start]) - target, NONE, NONE)}
        end = _search_ranks(cell, seen, np.flatnonzero(load_G < target).tolist())
        if end != NONE:
            cell.push(seen, end, min(seen[end][0], target - int(load_G[end])))
            continue
        if not adding:
            return int(load_G[start])
        room_G, is_free = _room(cell, load_G, target)
        gives = {rank: np.minimum(cell.quota_GE[rank], most) for rank, (most, *_) in seen.items()}
        supply, most = int(max(give_E.max() for give_E in gives.values())), int(room_G.max())
        if is_free:
            if gives[start].max() >= most:  # no other rank has to give
                gives = {start: gives[start]}
            enough = max(int(min(supply, most) * threshold), 1)
            pairs = [(rank, e) for rank in gives for e in cell.experts_on(rank) if gives[rank][e] >= enough]
            choices = [
                # room to spare is kept for more
                (enough - 0.5 * (int(room_G[to]) - enough) + (noise and noise * enough * next(cell.units)), rank, e, to)
                for rank, e in pairs
                for to in np.flatnonzero(room_G >= enough).tolist()
            ]
            _, rank, e, to = max(choices, key=itemgetter(0))
            cell.put(e, to)
            cell.push(seen | {to: (0, rank, e)}, to, int(min(gives[rank][e], room_G[to])))
            continue
        gains = [(min(supply - int(cell.quota_GE[rank, e]), int(room_G[rank])), rank, e) for rank, e in cell.filled()]
        gain, rank, e = max(gains, key=itemgetter(0), default=(0, NONE, NONE))
        if gain > 0 and evictions:
            evictions -= 1
            cell.clear(rank, e)
        else:
            target = -(-int(load_G[list(seen)].sum()) // len(seen))


def _search_ranks(cell: _Cell, seen: Seen, ends: Container[int] = ()) -> int:
    """Search breadth first along the edges, for one of the ends, which is returned; without ends against the edges."""
    queue = list(seen)
    for rank in queue:
        for e in cell.experts_on(rank):
            for to in cell.hosts_E[e]:
                serving = rank if ends else to
                width = min(seen[rank][0], int(cell.quota_GE[serving, e]))
                if width and to not in seen:
                    seen[to] = width, rank, e
                    queue.append(to)
                    if to in ends:
                        return to
    return NONE


def _room(cell: _Cell, load_G: Integers, target: int) -> tuple[Integers, bool]:
    """Compute what a new replica on each rank could take, int64 [G], and whether a slot is free for that."""
    room_G = np.maximum(target - load_G, 0)
    is_free_G = np.array([bool(cell.free_slots(rank)) for rank in range(len(load_G))])
    if (room_G * is_free_G).any():
        return room_G * is_free_G, True
    # what others could pass on to ranks below the target, over hosts that exist
    seen: Seen = {rank: (int(room_G[rank]), NONE, NONE) for rank in np.flatnonzero(room_G).tolist()}
    _search_ranks(cell, seen)
    room_G[list(seen)] = [width for width, *_ in seen.values()]
    passing_G = room_G * is_free_G  # no rank below the target has a free slot
    return (passing_G, True) if passing_G.any() else (room_G, False)


class _Cell:
    """Assignments of each expert that each rank serves, and the experts in its slots."""

    def __init__(self, loads_E: Integers, home_E: Integers, num_ranks: int, slots: int, seed: int) -> None:
        self.homes_G = [np.flatnonzero(home_E == rank).tolist() for rank in range(num_ranks)]
        self.quota_GE = np.zeros((num_ranks, len(loads_E)), np.int64)
        self.quota_GE[home_E, np.arange(len(loads_E))] = loads_E
        self.slot_GS = np.full((num_ranks, slots), NONE)
        # ranks: the home, then slots, the last filled first
        self.hosts_E: list[list[int]] = [[home] for home in home_E.tolist()]
        self.units = _units(index(seed))

    def filled(self) -> list[tuple[int, int]]:
        """Ranks and experts of replicas."""
        return [(rank, int(e)) for (rank, _), e in np.ndenumerate(self.slot_GS) if e != NONE]

    def experts_on(self, rank: int) -> list[int]:
        return self.homes_G[rank] + [e for e in self.slot_GS[rank].tolist() if e != NONE]

    def free_slots(self, rank: int) -> list[int]:
        """Slots that serve nothing, by number."""
        return [n for n, e in enumerate(self.slot_GS[rank].tolist()) if e == NONE or not self.quota_GE[rank, e]]

    def put(self, e: int, rank: int) -> None:
        """Let the first free slot hold an expert."""
        slot_S, number = self.slot_GS[rank], self.free_slots(rank)[0]
        if slot_S[number] != NONE:
            self.clear(rank, slot_S[number])
        slot_S[number] = e
        self.hosts_E[e].insert(1, rank)

    def clear(self, rank: int, e: int) -> None:
        """Empty the slot that holds an expert. What it served goes home."""
        self.slot_GS[rank, self.slot_GS[rank] == e] = NONE
        self.hosts_E[e].remove(rank)
        self.quota_GE[self.hosts_E[e][0], e] += self.quota_GE[rank, e]
        self.quota_GE[rank, e] = 0

    def take_out(self, least: int, share: float = 0.0) -> None:
        """Empty the slots that serve less, and a share of the others, drawn by lot."""
        for rank, e in self.filled():
            if self.quota_GE[rank, e] < least or (share and next(self.units) < share):
                self.clear(rank, e)

    def push(self, seen: Seen, end: int, amount: int) -> None:
        """Move load along the path that leads to a rank."""
        _, before, e = seen[end]
        while e != NONE:
            self.quota_GE[before, e] -= amount
            self.quota_GE[end, e] += amount
            end, (_, before, e) = before, seen[before]

    def saved(self) -> tuple[Integers, Integers]:
        return self.quota_GE.copy(), self.slot_GS.copy()

    def restore(self, saved: tuple[Integers, Integers]) -> None:
        self.quota_GE, self.slot_GS = (array.copy() for array in saved)
        self.hosts_E = [hosts[:1] for hosts in self.hosts_E]
        for rank, e in self.filled():
            self.hosts_E[e].insert(1, rank)


def _units(state: int) -> Iterator[float]:
    """Numbers from 0 to below 1, the same on every machine: splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    while True:
        state += 0x9E3779B97F4A7C15
        word = state % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ word >> shift) * factor % 2**64
        yield ((word ^ word >> 31) >> 32) / 2**32

"""Which weights a visit finds in the slots, and which it fetches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.plan.options import SlotUse
from foreroute.plan.step_plan import CellHosts

Ints = NDArray[np.int64]


class Visit(NamedTuple):
    """One micro-step through the layers of a pipeline stage."""

    backward: bool
    micro_step: int


@dataclass(frozen=True, eq=False)
class Hosts:
    """Who serves what in all cells of a step, without tokens.

    Attributes:
        shape: M and L.
        num_ranks: G.
        home_LE: int64 [L, E], where gradients go. A rank always has the weights of its homes.
        offsets: int64 [M * L + 1].
        expert_H, rank_H, fetched_H: of all cells, as in `CellHosts`.
        slots: whose the slots are. Those of a layer keep what they hold.
    """

    shape: tuple[int, int]
    num_ranks: int
    home_LE: Ints
    offsets: Ints
    expert_H: Ints
    rank_H: Ints
    fetched_H: NDArray[np.bool_]
    slots: SlotUse

    @classmethod
    def of(
        cls, assignments: Sequence[CellHosts], shape: tuple[int, int], home_LE: NDArray[np.integer], slots: SlotUse
    ) -> Hosts:
        """From the assignments of all cells, in the order of execution."""
        sizes = [len(one.expert_H) for one in assignments]
        return cls(
            shape,
            assignments[0].tokens_HG.shape[1],
            np.ascontiguousarray(home_LE, np.int64),
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            np.concatenate([one.expert_H for one in assignments]).astype(np.int64),
            np.concatenate([one.rank_H for one in assignments]).astype(np.int64),
            np.concatenate([one.fetched_H for one in assignments]),
            slots,
        )

    def away(self, micro_step: int, layer: int, *, fetched: bool = False) -> tuple[Ints, Ints]:
        """Expert and rank of the hosts of a cell that are no homes; on request those that the plan fetches alone."""
        c = micro_step * self.shape[1] + layer
        part = slice(int(self.offsets[c]), int(self.offsets[c + 1]))
        expert_H, rank_H = self.expert_H[part], self.rank_H[part]
        chosen_H = self.home_LE[layer, expert_H] != rank_H
        if fetched:
            chosen_H &= self.fetched_H[part]
        return expert_H[chosen_H], rank_H[chosen_H]


def fetched_hosts(hosts: Hosts, order: Sequence[Visit]) -> Iterator[tuple[Visit, int, Ints, Ints]]:
    """Visit, layer, experts and ranks of everything that is fetched, cell by cell.

    Slots of a layer hold what the plan left there as long as micro-steps come in the order in which it was made. Where
    a pipeline schedule goes back to an earlier micro-step, they hold what the cell visited last served. Slots that
    layers share hold nothing; `turns_back` says of which cells that is not so.
    """
    last: Visit | None = None
    for visit in order:
        in_order = last is None or (not visit.backward and visit.micro_step == last.micro_step + 1)
        for layer in range(hosts.shape[1]):
            if hosts.slots == "layer" and turns_back(visit, last):
                continue
            if hosts.slots == "shared":
                found = hosts.away(visit.micro_step, layer)
            elif in_order:
                found = hosts.away(visit.micro_step, layer, fetched=True)
            else:
                assert last is not None, "the first visit is in order"
                found = _missing(hosts.away(visit.micro_step, layer), hosts.away(last.micro_step, layer), hosts)
            if len(found[0]):
                yield visit, layer, *found
        last = visit


def turns_back(visit: Visit, last: Visit | None) -> bool:
    """Whether a backward visit follows its own forward visit, and so finds the last cells of it in place."""
    return visit.backward and last == Visit(False, visit.micro_step)


def _missing(wanted: tuple[Ints, Ints], held: tuple[Ints, Ints], hosts: Hosts) -> tuple[Ints, Ints]:
    keys = [expert_H * hosts.num_ranks + rank_H for expert_H, rank_H in (wanted, held)]
    missing_H = ~np.isin(keys[0], keys[1])
    return wanted[0][missing_H], wanted[1][missing_H]

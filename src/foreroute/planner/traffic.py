"""Replicas that keep tokens on their node, where the cost model says that they pay. Compiled (traffic.cpp).

Balancing loads takes few replicas and leaves most tokens crossing nodes, which at 32 ranks and more takes longer than
the experts. Here every node first picks, for the slots of all its ranks, the experts that its own tokens want most and
that do not live there. Then nodes serve their own tokens, foreign tokens go to the hosting node with the least to do,
and inside each node experts are laid on ranks, largest first, where they are already if that rank has room, cut where a
rank is full. All amounts are whole assignments.

With deduplicated dispatch one expert more saves little until most picks of a token are local, and then much; so plans
of a cell are built as a whole and priced as a whole, never grown replica by replica.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import PRICES, Prices
from foreroute.kernels import INT, NONE, ArrayOf, compiled
from foreroute.plan.hosts import CELL_PLAN, CellPlan

COPIES_LIMITS = np.array([np.inf, 1.25, 0.8])
"""Most replicas of one rank's home experts, by the slots of a rank, that plans are tried with: a home sends all of them
and receives their gradients, over one NIC. On 96 cells of G16 to G64 (two models, 2k and 8k tokens a rank, 4 and 8
slots, copies and dedup) cells take 2.8 % longer with 1.25 alone, 0.6 % without the last, 0.5 % with 2 in its place."""


def most_trials(slots: int) -> int:
    """Plans of a cell that are built and priced at most, the one to beat among them."""
    numbers = 0
    while slots > 0:
        slots, numbers = slots * 3 // 4, numbers + 1
    return 1 + numbers * len(COPIES_LIMITS)


def replicate_for_traffic(
    cell: CellPlan,
    counts_GE: NDArray[np.int32],
    wanted_NE: NDArray[np.float64],
    held_GS: NDArray[np.int16],
    keep: float,
    target: int,
    attention_2: NDArray[np.float64],
    prices: Prices,
) -> CellPlan:
    """Plan a cell anew for short traffic, if that is faster by the cost model; else it is `cell`, whose loads are even.

    `wanted_NE` says how much the tokens of each node want an expert, in assignments, `keep` by how much more one that
    the node holds in `held_GS`, -1 in empty slots. No rank should pass `target`.
    """
    worth_NE = wanted_NE.copy()
    rank_X, slot_X = np.nonzero(held_GS != NONE)
    held = rank_X // prices.ranks_per_node, held_GS[rank_X, slot_X]
    worth_NE[held] = wanted_NE[held] + keep  # held twice or once
    order_X = np.argsort(-worth_NE.ravel(), kind="stable")  # most wanted first; equal ones keep their order
    rows, num_ranks = held_GS.size, len(counts_GE)
    expert_R, rank_R, slot_R = (np.empty(rows, np.int16) for _ in range(3))
    found = CellPlan(
        cell.home_E, expert_R, rank_R, slot_R, np.empty(rows, np.bool_), np.empty((rows, num_ranks), np.int32)
    )
    asked = (counts_GE, wanted_NE, worth_NE, order_X, held_GS, target, COPIES_LIMITS, attention_2, prices)
    num_found = _replicate(cell, *asked, found)
    return cell if num_found == NONE else found.only(slice(num_found))


_replicate = compiled(
    "replicate_for_traffic",
    CELL_PLAN,
    ArrayOf(np.int32, 2),
    ArrayOf(np.float64, 2),
    ArrayOf(np.float64, 2),
    ArrayOf(np.int64, 1),
    ArrayOf(np.int16, 2),
    INT,
    ArrayOf(np.float64, 1),
    ArrayOf(np.float64, 1),
    PRICES,
    CELL_PLAN,
    returns=INT,
)

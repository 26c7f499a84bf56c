"""What later micro-steps will want of the replicas that slots keep."""

from __future__ import annotations

from typing import Any

from foreroute.balance.cells.kernel import part, step

WINDOW = 16
"""Micro-steps that a replica's use is foreseen."""
FADE = 0.9
"""What a later micro-step counts, by the one before."""


@step
def look_ahead(cell: Any, counts_MLGE: Any, home_LE: Any, first_layer: Any, end_layer: Any) -> None:
    """Fill `demand_MLE` and `surplus_MLG` of some layers."""
    num_ranks, num_experts = counts_MLGE.shape[2:]
    for m in range(len(counts_MLGE)):
        for layer in range(first_layer, end_layer):
            for e in range(num_experts):
                cell.demand_MLE[m, layer, e] = 0
            for g in range(num_ranks):
                cell.surplus_MLG[m, layer, g] = 0
                for e in range(num_experts):
                    cell.demand_MLE[m, layer, e] += counts_MLGE[m, layer, g, e]
            total = 0
            for e in range(num_experts):
                total += cell.demand_MLE[m, layer, e]
                cell.surplus_MLG[m, layer, home_LE[layer, e]] += cell.demand_MLE[m, layer, e]
            for g in range(num_ranks):
                cell.surplus_MLG[m, layer, g] -= total // num_ranks


@part
def wanted(cell: Any, expert: Any, rank: Any) -> Any:
    """How much a replica could serve in the next micro-steps, sooner ones counting more."""
    m, layer = cell.place[0], cell.place[1]
    home = cell.rank_H[expert]
    worth, weight = 0.0, 1.0
    for later in range(m + 1, min(m + 1 + WINDOW, len(cell.demand_MLE))):
        weight *= FADE
        surplus, room = cell.surplus_MLG[later, layer, home], -cell.surplus_MLG[later, layer, rank]
        if surplus > 0 and room > 0:
            worth += weight * min(cell.demand_MLE[later, layer, expert], min(surplus, room))
    return worth

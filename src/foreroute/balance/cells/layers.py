"""Cells in the order of execution: one call plans a block of micro-steps of some layers."""

from __future__ import annotations

from typing import Any

from foreroute.balance.cells.balance import balance
from foreroute.balance.cells.flow import heaviest
from foreroute.balance.cells.future import look_ahead
from foreroute.balance.cells.kernel import kernel, step
from foreroute.balance.cells.locality import keep_local
from foreroute.balance.cells.split import split
from foreroute.balance.cells.state import NONE, recall, serve_at_home, set_demand, set_homes, set_slots


@kernel
def plan_block(
    cell: Any,
    counts_MLGE: Any,
    home_LE: Any,
    held_LH: Any,
    begin: Any,
    end: Any,
    first_layer: Any,
    end_layer: Any,
    tolerance: Any,
    persistent: Any,
    locality: Any,
    ends_C: Any,
    expert_R: Any,
    rank_R: Any,
    slot_R: Any,
    fetched_R: Any,
    tokens_RG: Any,
    max_load_C: Any,
) -> None:
    """Plan the micro-steps `begin` to `end` of the layers `first_layer` to `end_layer`.

    The state must have planned the micro-steps before of the same layers. Counts are int32 and of the whole step, homes
    int16; `held_LH` int32 [L, H], what slots hold, is read and written when slots are `persistent`. The arrays of a
    `Block` are written.
    """
    row, c = 0, 0
    if persistent and begin == 0:
        look_ahead(cell, counts_MLGE, home_LE, first_layer, end_layer)
    for m in range(begin, end):
        for layer in range(first_layer, end_layer):
            cell.place[0], cell.place[1] = m if persistent else NONE, layer
            cell.random[0] = m * counts_MLGE.shape[1] + layer
            counts_GE = counts_MLGE[m, layer]
            set_homes(cell, home_LE[layer])
            set_slots(cell, held_LH[layer], persistent)
            _plan_cell(cell, set_demand(cell, counts_GE), tolerance, locality)
            row = split(cell, counts_GE, expert_R, rank_R, slot_R, fetched_R, tokens_RG, row, locality)
            ends_C[c] = row
            max_load_C[c] = cell.load_G[heaviest(cell.load_G)]
            c += 1
            if persistent:
                for x in range(len(cell.demand_E), len(cell.expert_H)):
                    if cell.quota_H[x]:
                        held_LH[layer, x] = cell.expert_H[x]


@step
def _plan_cell(cell: Any, total: Any, tolerance: Any, locality: Any) -> None:
    serve_at_home(cell)
    target = int(-((-total * (1.0 + tolerance)) // len(cell.load_G)))
    reached = balance(cell, target, tolerance > 0.0)
    recall(cell)
    if locality:
        keep_local(cell, reached)

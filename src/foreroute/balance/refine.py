"""What follows the cell level where the options ask for it: replicas against traffic, then the pay-off test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foreroute.balance.cells.blocks import Block, block_of
from foreroute.balance.costs import CostModel
from foreroute.balance.options import PlanOptions
from foreroute.balance.pay_off import pay_off
from foreroute.balance.step_plan import CellPlan
from foreroute.balance.topology import Topology
from foreroute.balance.traffic import replicate_for_traffic


class Refiner:
    """Refines blocks of cells as they are planned. The micro-steps of a layer must come in order."""

    def __init__(
        self,
        counts_MLGE: NDArray[np.int32],
        home_LE: NDArray[np.int16],
        topology: Topology,
        options: PlanOptions,
        costs: CostModel,
    ) -> None:
        """Of one step; layers may come from several threads."""
        self._counts_MLGE, self._home_LE = counts_MLGE, home_LE
        self._topology, self._options, self._costs = topology, options, costs
        slots = max(topology.redundant_slots, 1)
        self._held_LGP = np.full((len(home_LE), topology.num_ranks, slots), -1, np.int16)

    def refined(self, block: Block) -> Block:
        """The same cells with other replicas where that is faster."""
        places = [
            (m, layer)
            for m in range(block.begin, block.end)
            for layer in range(block.first_layer, block.first_layer + block.num_layers)
        ]
        cells = [self._cell(block.cell(m, layer, self._home_LE[layer]), m, layer) for m, layer in places]
        loads = [cell.loads_G(self._counts_MLGE[place]).max() for cell, place in zip(cells, places, strict=True)]
        return block_of(block, cells, np.array(loads, np.int64))

    def _cell(self, cell: CellPlan, micro_step: int, layer: int) -> CellPlan:
        counts_GE = self._counts_MLGE[micro_step, layer]
        if self._options.traffic:
            cell = replicate_for_traffic(
                cell, counts_GE, self._topology, self._costs, tolerance=self._options.tolerance
            )
        if not self._options.pay_off:
            return cell
        if self._options.slots == "shared":
            return pay_off(cell, counts_GE, self._topology, self._costs)
        # What was declined in an earlier micro-step is not in its slot, whatever the cell level planned.
        held_GP = self._held_LGP[layer]
        cell = replace(cell, fetched_R=held_GP[cell.rank_R, cell.slot_R] != cell.expert_R)
        cell = pay_off(cell, counts_GE, self._topology, self._costs)
        held_GP[cell.rank_R, cell.slot_R] = cell.expert_R
        return cell

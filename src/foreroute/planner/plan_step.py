"""The planner: counts of a step in, homes, replicas and token splits out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError, TopologyError
from foreroute.plan.counts import check_counts, counts_digest
from foreroute.plan.options import PlanOptions
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Topology
from foreroute.planner.homes import check_homes, place_homes
from foreroute.planner.progress import Block, OnProgress, PlanInProgress, empty_block, joined_blocks

if TYPE_CHECKING:  # it loads compiled code
    from foreroute.planner.refine import Refiner

DEFAULTS = PlanOptions()
LONGEST_BLOCK = 8
"""Micro-steps that one compiled call plans at most; the first plans one, so that execution can begin. Chosen by hand:
longer blocks would hand cells over later, and a call costs little beside eight micro-steps."""
SHARED_SETS = 2
"""Slots that all layers share are there twice: one set is filled while the other is used."""


def plan(
    counts_MLGE: NDArray[np.integer],
    topology: Topology,
    options: PlanOptions = DEFAULTS,
    *,
    home_LE: NDArray[np.integer] | None = None,
    costs: CostModel | None = None,
    on_progress: OnProgress | None = None,
) -> StepPlan:
    """Plan a step: where experts live, which are replicated in each cell, and who serves which token.

    Args:
        counts_MLGE: integers [M, L, G, E], assignments that source rank g sends to expert e in micro-step m, layer l.
        topology: ranks, nodes and slots.
        options: what the plan may do.
        home_LE: integers [L, E], the rank that each expert lives on now; E / G experts per rank. Contiguous when left
            out.
        costs: the cost model, which the option `traffic` and a limit of slot memory need, and `pay_off` goes by.
        on_progress: called with the number of cells planned so far and in all, from a planner's thread.

    Raises:
        CountsError: when the counts are no counts, not of these ranks, or of experts that do not divide over them.
        TopologyError: when ranks are not home to E / G experts each, or slots take more memory than there is.
        ConfigError: when something was asked for that needs a cost model, and there is none.
    """
    return start(counts_MLGE, topology, options, home_LE=home_LE, costs=costs, on_progress=on_progress).result()


def start(
    counts_MLGE: NDArray[np.integer],
    topology: Topology,
    options: PlanOptions = DEFAULTS,
    *,
    home_LE: NDArray[np.integer] | None = None,
    costs: CostModel | None = None,
    on_progress: OnProgress | None = None,
) -> PlanInProgress:
    """As `plan`, without waiting for it: cells can be taken from the first micro-step on. Input is checked first."""
    counts = check_counts(counts_MLGE, num_ranks=topology.num_ranks)
    num_micro_steps, num_layers, _, num_experts = counts.shape
    if home_LE is None:
        home_LE = np.tile(topology.contiguous_home_E(num_experts), (num_layers, 1))
    previous_LE = check_homes(home_LE, num_layers, num_experts, topology)
    _check_costs(topology, options, costs, num_layers)
    progress = PlanInProgress((num_micro_steps, num_layers), on_progress)
    step = _Step(counts, topology, options, previous_LE, costs, progress)
    threading.Thread(target=step.run, name="foreroute-plan", daemon=True).start()
    return progress


def block_ends(num_micro_steps: int) -> list[int]:
    """Where the blocks of micro-steps end that are planned at once: 1, 2, 4, 8, then every `LONGEST_BLOCK`."""
    ends = [1]
    while ends[-1] < num_micro_steps:
        ends.append(min(2 * ends[-1], ends[-1] + LONGEST_BLOCK, num_micro_steps))
    return ends


def _check_costs(topology: Topology, options: PlanOptions, costs: CostModel | None, num_layers: int) -> None:
    """What needs a cost model has one, and redundant slots fit into their memory."""
    needs = {
        "traffic": options.traffic,
        "slot_memory_bytes": topology.slot_memory_bytes is not None,
    }
    if costs is None:
        asked = [name for name, needed in needs.items() if needed]
        if asked:
            raise ConfigError(f"{' and '.join(asked)} cannot be heeded without a cost model; pass costs")
        return
    if topology.slot_memory_bytes is None or not options.replicas:
        return
    sets = num_layers if options.slots == "layer" else SHARED_SETS
    size = int(topology.redundant_slots * sets * costs.model.expert_bytes)
    if size > topology.slot_memory_bytes:
        raise TopologyError(
            f"{topology.redundant_slots} redundant slots in {sets} sets, with {costs.model.expert_bytes:,.0f} bytes an "
            f"expert, take {size:,} bytes of a rank; slot_memory_bytes is {topology.slot_memory_bytes:,}. Use fewer "
            "slots, or slots='shared'"
        )


@dataclass(frozen=True, eq=False)
class _Step:
    """A step that is planned, in a thread of its own; `progress` is where others see it."""

    counts: NDArray[np.int32]
    topology: Topology
    options: PlanOptions
    previous_LE: NDArray[np.int16]
    costs: CostModel | None
    progress: PlanInProgress

    def run(self) -> None:
        """Place homes, plan all cells, and put the plan together."""
        counts, topology, options = self.counts, self.topology, self.options
        num_micro_steps, num_layers, num_ranks, num_experts = counts.shape
        try:
            home_LE = place_homes(
                counts,
                topology,
                self.previous_LE,
                max_moves=options.home_moves,
                seed=options.seed,
                threads=options.threads,
            )
            self.progress.settle_homes(home_LE)
            # Cells first: whoever waits for the first of them need not wait for sums and digests of all counts.
            blocks = self._plan_cells(home_LE)
            found = StepPlan(
                topology=topology,
                shape=(num_micro_steps, num_layers, num_experts),
                previous_home_LE=self.previous_LE,
                home_LE=home_LE,
                bound_ML=counts.sum(axis=(2, 3), dtype=np.int64) / num_ranks,
                counts_digest=counts_digest(counts),
                slots=options.slots,
                **joined_blocks(blocks, num_micro_steps, num_layers),
            )
            self.progress.finish(found)
        except BaseException as error:  # it must reach whoever waits, in another thread
            self.progress.fail(error)

    def _plan_cells(self, home_LE: NDArray[np.int16]) -> list[Block]:
        """Layers do not depend on each other, so every thread takes some of them through all micro-steps."""
        refiner = None
        if self.costs is not None and (self.options.traffic or self.options.pay_off):
            from foreroute.planner.refine import Refiner

            refiner = Refiner(self.counts, home_LE, self.topology, self.options, self.costs)
        num_layers, threads = len(home_LE), self.options.threads
        bounds = [num_layers * i // threads for i in range(threads + 1)]
        parts = [range(first, end) for first, end in pairwise(bounds) if first < end]
        if len(parts) == 1:
            return self._plan_layers(home_LE, refiner, parts[0])
        with ThreadPoolExecutor(threads) as pool:
            planned = pool.map(lambda layers: self._plan_layers(home_LE, refiner, layers), parts)
            return [block for blocks in planned for block in blocks]

    def _plan_layers(self, home_LE: NDArray[np.int16], refiner: Refiner | None, layers: range) -> list[Block]:
        from foreroute.planner.cell import NONE, new_cell
        from foreroute.planner.replicas import plan_block

        options = self.options
        num_micro_steps, num_layers, num_ranks, num_experts = self.counts.shape
        slots = self.topology.redundant_slots if options.replicas else 0
        cell = new_cell(num_ranks, self.topology.num_nodes, num_experts, slots, (num_micro_steps, num_layers))
        held_LH = np.full((num_layers, num_experts + num_ranks * slots), NONE, np.int32)
        blocks: list[Block] = []
        for begin, end in pairwise([0, *block_ends(num_micro_steps)]):
            block = empty_block(begin, end, layers, num_ranks, slots)
            persistent = options.slots == "layer"
            plan_block(cell, self.counts, home_LE, held_LH, block, options.tolerance, persistent, options.locality)
            if refiner is not None:
                block = refiner.refined(block)
            self.progress.add(block)
            blocks.append(block)
        return blocks

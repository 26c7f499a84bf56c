"""The planner: counts of a step in, homes, replicas and token splits out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError, TopologyError
from foreroute.plan.counts import check_counts, counts_digest
from foreroute.plan.hosts import Hosts
from foreroute.plan.options import PlanOptions
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Topology
from foreroute.planner.homes import check_homes, place_homes
from foreroute.planner.progress import OnProgress, PlanInProgress, block_ends

DEFAULTS = PlanOptions()


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
        costs: the cost model, which `traffic`, `pay_off` and a limit of slot memory need.
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
    """As `plan`, without waiting for it: micro-steps can be taken as they are planned. Input is checked first."""
    counts = check_counts(counts_MLGE, num_ranks=topology.num_ranks)
    num_micro_steps, num_layers, _, num_experts = counts.shape
    if home_LE is None:
        home_LE = np.tile(topology.contiguous_home_E(num_experts), (num_layers, 1))
    previous_LE = check_homes(home_LE, num_layers, num_experts, topology.num_ranks)
    _check_costs(topology, options, costs, num_layers)
    part_of = partial(_part, counts, topology, options, previous_LE)
    progress = PlanInProgress((num_micro_steps, num_layers), part_of, on_progress)

    def run() -> None:
        try:
            progress.end(_planned(counts, topology, options, previous_LE, costs, progress))
        except BaseException as error:  # it must reach whoever waits, in another thread
            progress.end(None, error)

    threading.Thread(target=run, name="foreroute-plan", daemon=True).start()
    return progress


def _check_costs(topology: Topology, options: PlanOptions, costs: CostModel | None, num_layers: int) -> None:
    """What needs a cost model has one, and redundant slots fit into their memory."""
    needs = {
        "traffic": bool(options.traffic),
        "pay_off": bool(options.pay_off),
        "slot_memory_bytes": topology.slot_memory_bytes is not None,
    }
    if costs is None:
        asked = [name for name, needed in needs.items() if needed]
        if asked:
            raise ConfigError(f"{' and '.join(asked)} cannot be heeded without a cost model; pass costs")
        return
    if topology.slot_memory_bytes is None or not options.replicas:
        return
    # slots that all layers share: a set for the cell that runs, and one for each that is fetched ahead
    sets = num_layers if options.slots == "layer" else 1 + costs.prefetch
    size = int(topology.redundant_slots * sets * costs.model.expert_bytes)
    if size > topology.slot_memory_bytes:
        raise TopologyError(
            f"{topology.redundant_slots} redundant slots in {sets} sets, with {costs.model.expert_bytes:,.0f} bytes an "
            f"expert, take {size:,} bytes of a rank; slot_memory_bytes is {topology.slot_memory_bytes:,}. Use fewer "
            "slots, or slots='shared'"
        )


def _planned(
    counts: NDArray[np.int32],
    topology: Topology,
    options: PlanOptions,
    previous_LE: NDArray[np.int16],
    costs: CostModel | None,
    progress: PlanInProgress,
) -> StepPlan:
    """Place homes, plan all cells, and put the plan together."""
    home_LE = previous_LE.copy()
    if options.home_moves != 0:
        home_LE = place_homes(
            counts, topology, previous_LE, max_moves=options.home_moves, seed=options.seed, threads=options.threads
        )
    # Cells first: whoever waits for the first of them need not wait for sums and digests of all counts.
    _plan_cells(counts, topology, options, home_LE, costs, progress)
    return progress.part(0)


def _slots(topology: Topology, options: PlanOptions) -> int:
    return topology.redundant_slots if options.replicas else 0


def _part(
    counts: NDArray[np.int32],
    topology: Topology,
    options: PlanOptions,
    previous_LE: NDArray[np.int16],
    hosts: Hosts,
    max_load_ML: NDArray[np.int64],
    begin: int,
) -> StepPlan:
    """The plan of micro-steps from number `begin` on, as if there were no others: slots are empty before."""
    # numba loads with the first plan
    from foreroute.planner.bound import least_loads

    counts_MLGE = counts[begin : begin + len(max_load_ML)]
    num_layers = counts.shape[1]
    if begin:
        layer_R = np.repeat(np.arange(max_load_ML.size) % num_layers, np.diff(hosts.offsets))
        slot_R = (layer_R * topology.num_ranks + hosts.rank_R) * topology.redundant_slots + hosts.slot_R
        hosts.fetched_R[np.unique(slot_R, return_index=True)[1]] = True
    return StepPlan(
        topology=topology,
        previous_home_LE=previous_LE,
        max_load_ML=max_load_ML,
        bound_ML=least_loads(counts_MLGE, hosts.home_LE, _slots(topology, options)),
        counts_digest=counts_digest(counts_MLGE),
        slots=options.slots,
        **hosts._asdict(),
    )


def _plan_cells(
    counts: NDArray[np.int32],
    topology: Topology,
    options: PlanOptions,
    home_LE: NDArray[np.int16],
    costs: CostModel | None,
    progress: PlanInProgress,
) -> None:
    """Layers do not depend on each other, so every thread takes some of them through all micro-steps."""
    from foreroute.kernels import NONE
    from foreroute.planner.cell import look_ahead, new_cell
    from foreroute.planner.priced import PricedOptions
    from foreroute.planner.replicas import plan_block

    num_micro_steps, num_layers, num_ranks, num_experts = counts.shape
    slots, persistent = _slots(topology, options), options.slots == "layer"
    outlook = look_ahead(counts if persistent else counts[:0], home_LE)
    held_LH = np.full((num_layers, num_experts + num_ranks * slots), NONE, np.int32)
    priced = PricedOptions(counts, topology, options, costs)

    def plan_layers(layers: slice) -> None:
        cell = new_cell(num_ranks, num_experts, slots, topology.ranks_per_node, outlook, persistent)
        for begin, end in pairwise([0, *block_ends(num_micro_steps)]):
            place = (begin, end, layers.start, layers.stop)
            hosts = Hosts.with_room(home_LE[layers], end - begin, num_ranks, num_ranks * slots)
            max_load_ML = np.zeros((end - begin, len(hosts.home_LE)), np.int64)
            plan_block(cell, counts, hosts, max_load_ML.ravel(), held_LH, place, options.tolerance, options.locality)
            if priced.is_any_on:
                hosts = priced.refine(hosts, max_load_ML, place)
            progress.add((hosts, max_load_ML), slice(begin, end), layers)

    bounds = [num_layers * i // options.threads for i in range(options.threads + 1)]
    parts = [slice(first, end) for first, end in pairwise(bounds) if first < end]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(plan_layers, parts))
    progress.priced_options = priced.why()

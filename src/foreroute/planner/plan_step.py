"""The planner: counts of a step in, homes, replicas and token splits out."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.costs.pricing import Squares, parts_of_cells, slowest_attention
from foreroute.errors import ConfigError, CountsError
from foreroute.kernels import BOOL, FLOAT, INT, NONE, ArrayOf, StructOf, compiled
from foreroute.plan.counts import check_counts, counts_digest
from foreroute.plan.hosts import HOSTS, Hosts
from foreroute.plan.options import PASS_NAMES, PRICED, PassName, PlanOptions
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Topology, check_homes
from foreroute.planner.homes import place_homes
from foreroute.planner.priced import PricedOptions

OnProgress = Callable[[int, int], None]
"""Called with the cells planned so far and the cells in all, from a planner's thread."""

DEFAULTS = PlanOptions()
BLOCK = 8
"""Micro-steps that one compiled call plans. Chosen by hand: where nothing is priced, progress is told after each, and a
call costs little beside eight micro-steps."""


class _Later(NamedTuple):
    """Assignments that the search foresees, as search::Later of cell.hpp."""

    demand_LEM: NDArray[np.int32]  # assignments of each expert
    surplus_LGM: NDArray[np.int32]  # what ranks have at home above the mean


_plan_block = compiled(
    "plan_block",
    ArrayOf(np.int32, 4),  # counts_MLGE
    StructOf(demand_LEM=ArrayOf(np.int32, 3), surplus_LGM=ArrayOf(np.int32, 3)),
    HOSTS,
    ArrayOf(np.int64, 2, filled=True),  # [C, 2], what the slowest rank of each cell serves, and serves at least
    ArrayOf(np.int32, 2, filled=True),  # held_LH, what slots hold where they are persistent
    *(INT, INT, INT, INT),  # micro-steps, and layers, from the first number to before the second
    *(INT, INT, BOOL, FLOAT, BOOL),  # slots, ranks per node, whether slots are persistent, tolerance, locality
)


def plan(
    counts_MLGE: NDArray[np.integer],
    topology: Topology,
    options: PlanOptions = DEFAULTS,
    *,
    home_LE: NDArray[np.integer] | None = None,
    costs: CostModel | None = None,
    squares_MG: Squares = None,
) -> StepPlan:
    """Plan a step: where experts live, which are replicated in each cell, and who serves which token.

    Args:
        counts_MLGE: integers [M, L, G, E], assignments that source rank g sends to expert e in micro-step m, layer l.
        topology: ranks, nodes and slots.
        options: what the plan may do.
        home_LE: integers [L, E], the rank that each expert lives on now; E / G experts per rank. Contiguous when left
            out.
        costs: the cost model, which `traffic` and `pay_off` need. The plan then says of recompute and update apart
            whether it is executed there, or every expert serves at its home (`StepPlan.gains`).
        squares_MG: integers [M, G], sums of squared lengths of the sequences, by which attention is priced; by default
            they are as long as `costs.sequence_tokens`.

    Raises:
        CountsError: when the counts are no counts, not of these ranks, or of experts that do not divide over them; for
            squares of another shape.
        TopologyError: when ranks are not home to E / G experts each.
        ConfigError: when something was asked for that needs a cost model, and there is none, or needs sequences; for
            a topology or costs of another type.
    """
    found, _ = plan_and_why(counts_MLGE, topology, options, home_LE=home_LE, costs=costs, squares_MG=squares_MG)
    near, far = topology.links.node_bytes_per_s, topology.links.cluster_bytes_per_s
    if topology.num_nodes > 1 and far > near:
        warnings.warn(
            f"cluster_bytes_per_s of the links is {far:g}, and node_bytes_per_s {near:g}: other nodes are nearer than "
            "ranks of the same node",
            stacklevel=2,
        )
    return found


def plan_and_why(
    counts_MLGE: NDArray[np.integer],
    topology: Topology,
    options: PlanOptions = DEFAULTS,
    *,
    home_LE: NDArray[np.integer] | None = None,
    costs: CostModel | None = None,
    squares_MG: Squares = None,
    on_progress: OnProgress | None = None,
) -> tuple[StepPlan, dict[str, str]]:
    """As `plan`, and why: by priced option ("traffic", "pay_off") whether it is on, by pass what is executed.

    `on_progress` is called with the number of cells planned so far and in all, from a planner's thread.
    """
    for name, given, expected in (("topology", topology, Topology), ("costs", costs, CostModel)):
        if not isinstance(given, expected) and (name, given) != ("costs", None):
            raise ConfigError(
                f"{name} is a {type(given).__name__}; expected a {expected.__name__}: load_cluster(path).{name} of a "
                "topology file"
            )
    counts = check_counts(counts_MLGE, num_ranks=topology.num_ranks)
    _, num_layers, _, num_experts = counts.shape
    if squares_MG is not None and np.shape(squares_MG) != counts.shape[::2]:
        raise CountsError(
            f"squares_MG has shape {np.shape(squares_MG)}; expected {counts.shape[::2]}, micro-steps and source "
            "ranks of the counts"
        )
    if home_LE is None:
        home_LE = topology.contiguous_home_LE(num_layers, num_experts)
    previous_LE = check_homes(home_LE, num_layers, num_experts, topology.num_ranks)
    # asked for by name, so that leaving it out in silence would be wrong
    if options.packing != "length":
        raise ConfigError(
            f"packing is {options.packing!r}, and counts are of packed sequences; pass the counts of each sequence to "
            "pack_sequences, and packing='length' here"
        )
    if costs is None and (options.traffic or options.pay_off):
        asked = " and ".join(name for name in PRICED if getattr(options, name))
        raise ConfigError(f"{asked} cannot be priced without a cost model; pass costs")
    home_LE = previous_LE.copy()
    if options.home_moves != 0:
        home_LE = place_homes(counts, topology, home_LE, max_moves=options.home_moves, threads=options.threads)
    # no placement of experts changes attention, so it is priced once
    attention_ML2 = None if costs is None else slowest_attention(counts, costs, squares_MG)
    priced = PricedOptions(counts, topology, options, costs, attention_ML2)
    hosts, figures_ML2, why = _plan_cells(counts, topology, options, home_LE, priced, on_progress)
    gains = _gains(hosts, counts, topology, costs, attention_ML2, options)
    found = StepPlan(
        topology=topology,
        previous_home_LE=previous_LE,
        hosts=hosts,
        max_load_ML=figures_ML2[..., 0].copy(),
        bound_ML=figures_ML2[..., 1].astype(np.float64),
        counts_digest=counts_digest(counts),
        slots=options.slots,
        gains=gains,
        priced_paths=None if costs is None or (options.traffic, options.pay_off) == (False, False) else costs.paths,
        unpriced=costs.unpriced if costs is not None and gains else (),
    )
    return found, why | {pass_name: found.decision(pass_name) for pass_name in PASS_NAMES}


def _gains(
    hosts: Hosts,
    counts: NDArray[np.int32],
    topology: Topology,
    costs: CostModel | None,
    attention_ML2: NDArray[np.float64] | None,
    options: PlanOptions,
) -> dict[PassName, float]:
    """Gains by pass: the share that a plan saves of the seconds of all cells at home, each as if it paid for all alone.

    Nothing where no prices are known, or nothing is to be decided.
    """
    if costs is None or attention_ML2 is None or options.pay_off is False:
        return {}
    # the same homes: moves were made before, and are no part of the decision
    at_home = Hosts.with_room(hosts.home_LE, len(counts), topology.num_ranks, 0)
    prices = costs.prices(topology, options.slots)
    home_S, planned_S = (parts_of_cells(each, counts, attention_ML2, prices).sum(axis=1) for each in (at_home, hosts))
    once_s = costs.step_seconds(hosts, topology)
    saved_S = (home_S - planned_S - once_s) / home_S
    return dict(zip(PASS_NAMES, saved_S.tolist(), strict=True))


def _plan_cells(
    counts: NDArray[np.int32],
    topology: Topology,
    options: PlanOptions,
    home_LE: NDArray[np.int16],
    priced: PricedOptions,
    on_progress: OnProgress | None,
) -> tuple[Hosts, NDArray[np.int64], dict[str, str]]:
    """Plan all cells: the hosts; int64 [M, L, 2], the slowest rank's load and `least_load`; reasons by option."""
    num_micro_steps, num_layers, num_ranks, num_experts = counts.shape
    slots = topology.redundant_slots if options.replicas else 0
    persistent = options.slots == "layer"
    later = _look_ahead(counts if persistent else counts[:0], home_LE)
    held_LH = np.full((num_layers, num_experts + num_ranks * slots), NONE, np.int32)
    planned, telling = 0, threading.Lock()

    def count_planned(num_cells: int) -> None:
        nonlocal planned
        with telling:
            planned += num_cells
            if on_progress is not None:
                on_progress(planned, num_micro_steps * num_layers)

    def plan_layers(layers: slice) -> tuple[Hosts, NDArray[np.int64]]:
        hosts = Hosts.with_room(home_LE[layers], num_micro_steps, num_ranks, num_ranks * slots)
        figures_ML2 = np.zeros((num_micro_steps, len(hosts.home_LE), 2), np.int64)
        figures_C2 = figures_ML2.reshape(-1, 2)
        for begin in range(0, num_micro_steps, BLOCK):
            end = min(begin + BLOCK, num_micro_steps)
            block = begin, end, layers.start, layers.stop
            how = slots, topology.ranks_per_node, persistent, options.tolerance, options.locality
            _plan_block(counts, later, hosts, figures_C2, held_LH, *block, *how)
            if not priced.is_any_on:
                count_planned((end - begin) * len(hosts.home_LE))
        if priced.is_any_on:
            priced.refine(hosts, figures_ML2[..., 0], layers.start, count_planned)
        return hosts.part(0, num_micro_steps), figures_ML2

    # Layers do not depend on each other, so every thread takes some through all micro-steps; layers in a row, so that a
    # thread's replicas are one piece of the plan.
    bounds = [num_layers * i // options.threads for i in range(options.threads + 1)]
    parts = [slice(first, end) for first, end in pairwise(bounds) if first < end]
    with ThreadPoolExecutor(len(parts)) as pool:
        hosts, figures = zip(*pool.map(plan_layers, parts), strict=True)
    return Hosts.side_by_side(hosts), np.concatenate(figures, axis=1), priced.why()


def _look_ahead(counts_MLGE: NDArray[np.int32], home_LE: NDArray[np.int16]) -> _Later:
    """Sum what all micro-steps need, and have at home."""
    demand_MLE = counts_MLGE.sum(axis=2, dtype=np.int32)
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLGE.shape
    by_rank_MLE = np.take_along_axis(demand_MLE, np.argsort(home_LE, axis=1)[None], axis=2)
    load_MLG = by_rank_MLE.reshape(num_micro_steps, num_layers, num_ranks, num_experts // num_ranks).sum(axis=3)
    surplus_MLG = (load_MLG - load_MLG.sum(axis=2, keepdims=True) // num_ranks).astype(np.int32)
    # the search reads the micro-steps of one expert and of one rank
    return _Later(*(np.ascontiguousarray(one.transpose(1, 2, 0)) for one in (demand_MLE, surplus_MLG)))

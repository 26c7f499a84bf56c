"""The steps that are simulated, one for each expert-parallel group: drawn or read from files; and their size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foreroute.costs.model import CostModel, ModelShape
from foreroute.errors import ConfigError
from foreroute.layout import Packing
from foreroute.plan.topology import Topology
from foreroute.planner.packed_homes import PackedSequences
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.step_files import read_step
from foreroute.simulate.workload import WORKLOADS, DrawnStep, Workload

if TYPE_CHECKING:
    from foreroute.simulate.config import SimulateConfig, WorkloadConfig

MOST_MEMORY = 2 << 30
"""Bytes. 32 micro-steps of all layers of DeepSeek-V3 on 64 ranks take half of it."""


def group_steps(config: SimulateConfig, topology: Topology, costs: CostModel) -> Iterator[BalancerInput]:
    """One for each group that is looked at; they stand in turn for all groups of the cluster.

    Raises `InputError` for a file of another model or of other ranks, or that is none.
    """
    drawn, model, groups = config.workload, costs.model, _groups(config)
    if not drawn.are_drawn:
        read = read_step(
            Path(drawn.counts) if drawn.counts is not None else [Path(trace) for trace in drawn.traces],
            topology,
            costs,
            before=None if drawn.previous_counts is None else Path(drawn.previous_counts),
            token_budget=drawn.tokens_per_rank,
            whole_tokens=True,
        )
        shape, source = (1, *read.counts_MLGE.shape[:2]), drawn.counts or ", ".join(drawn.traces)
        require_memory(shape, topology, model, source=source)
        yield read
        return
    # all groups train the same weights on one draw, so their routes are alike, as in a run
    workload = drawn_workload(drawn, topology.num_ranks, model, groups)
    # methods that plan from the step before are given one of the same run
    step, before = (workload.draw(seed=drawn.seed, step=number) for number in (1, 0))
    packing = Packing(step.micro_step_S, step.rank_S, workload.num_micro_steps, workload.num_ranks)
    counts, squares_MG = step.counts(), packing.sums(step.rows_S.astype(np.int64) ** 2)
    previous_LE = before.counts().sum(axis=(0, 2), dtype=np.int64)
    home_LE = topology.contiguous_home_LE(workload.num_layers, model.num_experts)
    for group in range(groups):
        part = group * drawn.micro_steps, (group + 1) * drawn.micro_steps
        yield BalancerInput(
            counts[slice(*part)],
            topology,
            home_LE,
            previous_LE,
            squares_MG=squares_MG[slice(*part)],
            sequences=partial(_drawn_sequences, step, *part, costs),
            previous_sequences=partial(_drawn_sequences, before, *part, costs),
        )


def require_drawable(config: SimulateConfig, topology: Topology, model: ModelShape, *, source: str) -> None:
    """Raise `ConfigError` for a workload that cannot be, or takes too much memory."""
    groups = _groups(config)
    try:
        workload = drawn_workload(config.workload, topology.num_ranks, model, groups)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    require_memory((groups, config.workload.micro_steps, workload.num_layers), topology, model, source=source)


def require_memory(shape: tuple[int, int, int], topology: Topology, model: ModelShape, *, source: str) -> None:
    """Raise `ConfigError` for too much memory; `shape` are the groups, micro-steps and layers that are planned."""
    groups, micro_steps, layers = shape
    ranks, slots, experts = topology.num_ranks, topology.redundant_slots, model.num_experts
    cells, passes = micro_steps * layers, micro_steps * model.num_layers * ranks
    entries = ranks * (experts + slots * ranks)  # of a cell: tokens by host and source, every slot filled
    # bytes: counts and shares of all groups, the assignments of one by one method, and the times of its passes
    memory = groups * cells * experts * (24 + 12 * ranks) + 16 * cells * entries + 500 * passes
    if memory > MOST_MEMORY:
        raise ConfigError(
            f"{source}: {groups} groups x {micro_steps} micro-steps x {layers} of {model.num_layers} layers x {ranks} "
            f"ranks with {slots} slots x {experts} experts would take about {memory / (1 << 30):,.0f} GB of memory; "
            f"expected at most {MOST_MEMORY >> 30} GB. Draw fewer groups, layers or micro-steps, which stand for the "
            "others"
        )


def drawn_workload(load: WorkloadConfig, num_ranks: int, model: ModelShape, groups: int) -> Workload:
    """Workload to draw from: the micro-steps of all groups, one group after the other."""
    base = WORKLOADS[load.preset]
    workload = replace(
        base,
        num_ranks=num_ranks,
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_micro_steps=load.micro_steps * groups,
        num_layers=min(load.layers or model.num_layers, model.num_layers),
        layer_evenness=base.layer_evenness / load.skew,
        micro_step_evenness=base.micro_step_evenness / load.skew,
    )
    return workload if load.tokens_per_rank is None else workload.of_tokens(load.tokens_per_rank)


def _groups(config: SimulateConfig) -> int:
    most = config.workload.groups
    return config.cluster.groups if most is None else min(most, config.cluster.groups)


def _drawn_sequences(step: DrawnStep, begin: int, end: int, costs: CostModel) -> PackedSequences:
    """Draw the sequences of some micro-steps; no rank gets more tokens than one has there."""
    first, last = np.searchsorted(step.micro_step_S, (begin, end))
    lengths_S = step.rows_S[first:last].astype(np.int64)
    packing = Packing(
        step.micro_step_S[first:last] - begin, step.rank_S[first:last], end - begin, step.workload.num_ranks
    )
    return PackedSequences(
        packing=packing,
        lengths_S=lengths_S,
        counts_SLE=step.sequence_counts(begin, end),
        token_budget=int(packing.sums(lengths_S).max()),
        square_cost=costs.square_cost,
    )

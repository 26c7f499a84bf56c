"""The steps that are simulated, one for each expert-parallel group: drawn or read from files; and their size."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel, ModelShape
from foreroute.errors import ConfigError, CountsError, InputError, shown
from foreroute.layout import Packing, pack_sequences
from foreroute.plan.counts import check_counts, load_counts, packed_counts, sequence_counts
from foreroute.plan.topology import Topology
from foreroute.planner.packed_homes import PackedSequences
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.workload import WORKLOADS, DrawnStep, Workload
from foreroute.trace import NO_VERSION, RoutingTrace, load
from foreroute.trace.container import digest

if TYPE_CHECKING:
    from foreroute.simulate.config import SimulateConfig, WorkloadConfig

MOST_MEMORY = 2 << 30
"""Bytes. 32 micro-steps of all layers of DeepSeek-V3 on 64 ranks take half of it."""
TOKEN_BUDGET = 16_384
"""Most tokens of a rank in a micro-step, where sequences of traces are packed and nobody says how many."""


def group_steps(config: SimulateConfig, topology: Topology, costs: CostModel) -> Iterator[BalancerInput]:
    """One for each group that is looked at; they stand in turn for all groups of the cluster.

    Raises `InputError` for a file of another model or of other ranks, or that is none.
    """
    drawn, model, groups = config.workload, costs.model, _groups(config)
    if not drawn.are_drawn:
        yield _read(config, topology, costs)
        return
    # all groups train the same weights on one draw, so their routes are alike, as in a run
    workload = drawn_workload(drawn, topology.num_ranks, model, groups)
    # methods that plan from the step before are given one of the same run
    step, before = (workload.draw(seed=drawn.seed, step=number) for number in (1, 0))
    counts, squares_MG = step.counts(), squares(step, step.rows_S, (workload.num_micro_steps, workload.num_ranks))
    previous_LE = before.counts().sum(axis=(0, 2), dtype=np.int64)
    home_LE = np.tile(topology.contiguous_home_E(model.num_experts), (workload.num_layers, 1))
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


def read_traces(paths: Sequence[str | Path]) -> list[RoutingTrace]:
    """Read the traces of one step, and so of one model. Raises `InputError` for a trace that is there twice."""
    traces = [load(path) for path in paths]
    path_of: dict[str, str | Path] = {}
    for path, trace in zip(paths, traces, strict=True):
        # sequences of several models, or each twice, would be packed into a step that nobody runs
        traces[0].spec.require_same(trace.spec, what=str(path))
        if not len(trace):
            continue
        if (same := digest(trace)) in path_of:
            raise InputError(f"{path} holds the sequences of {path_of[same]}; a step has each once: leave one out")
        path_of[same] = path
    _warn_of_other_weights(paths, traces)
    return traces


def _warn_of_other_weights(paths: Sequence[str | Path], traces: Sequence[RoutingTrace]) -> None:
    """Warn where traces fall apart into two sets without weights in common, as those of two steps or runs do."""
    stated = [(path, {*trace.versions} - {NO_VERSION}) for path, trace in zip(paths, traces, strict=True)]
    left = [(path, versions) for path, versions in stated if versions]
    together = set(left[0][1]) if left else set()
    while len(apart := [(path, versions) for path, versions in left if versions.isdisjoint(together)]) < len(left):
        together.update(*(versions for _, versions in left if not versions.isdisjoint(together)))
        left = apart
    if left:
        path, versions = left[0]
        warnings.warn(
            f"{path} was sampled under weight versions {shown(sorted(versions))}, others under "
            f"{shown(sorted(together))}; leave one out, unless one step trains on both",
            stacklevel=2,
        )


def packed(
    traces: Sequence[RoutingTrace],
    budget: int,
    num_ranks: int,
    costs: CostModel,
    *,
    home_LE: NDArray[np.integer] | None = None,
) -> Packing:
    """Say where the sequences of all traces go, so that the attention of ranks takes equally long.

    With homes, they are packed by routes, so that experts there are level.
    """
    counts = None if home_LE is None else sequence_counts(traces)
    lengths_S, square_cost = _lengths(traces), costs.square_cost
    return pack_sequences(lengths_S, num_ranks, budget, square_cost=square_cost, counts=counts, homes=home_LE)


def packed_sequences(
    traces: Sequence[RoutingTrace], packing: Packing, budget: int, costs: CostModel
) -> PackedSequences:
    """Count the sequences of all traces, which lie so."""
    return PackedSequences(
        packing=packing,
        lengths_S=_lengths(traces),
        counts_SLE=sequence_counts(traces),
        token_budget=budget,
        square_cost=costs.square_cost,
    )


def _drawn_sequences(step: DrawnStep, begin: int, end: int, costs: CostModel) -> PackedSequences:
    """Draw the sequences of some micro-steps; no rank gets more tokens than one has there."""
    first, last = np.searchsorted(step.micro_step_S, (begin, end))
    lengths_S = step.rows_S[first:last].astype(np.int64)
    packing = Packing(
        step.micro_step_S[first:last] - begin, step.rank_S[first:last], end - begin, step.workload.num_ranks
    )
    held_MG = np.zeros((packing.num_micro_steps, packing.num_ranks), np.int64)
    np.add.at(held_MG, (packing.micro_step_S, packing.rank_S), lengths_S)
    return PackedSequences(
        packing=packing,
        lengths_S=lengths_S,
        counts_SLE=step.sequence_counts(begin, end),
        token_budget=int(held_MG.max()),
        square_cost=costs.square_cost,
    )


def _lengths(traces: Sequence[RoutingTrace]) -> NDArray[np.int64]:
    return np.concatenate([trace.lengths for trace in traces]).astype(np.int64)


def _read(config: SimulateConfig, topology: Topology, costs: CostModel) -> BalancerInput:
    given, model, ranks = config.workload, costs.model, topology.num_ranks
    squares_MG, top_k, sequences = None, model.top_k, None
    if given.counts is not None:
        source, counts = given.counts, load_counts(Path(given.counts))
    else:
        source, traces = ", ".join(given.traces), read_traces(given.traces)
        budget, top_k = given.tokens_per_rank or TOKEN_BUDGET, traces[0].spec.top_k
        packing = packed(traces, budget, ranks, costs)
        counts = packed_counts(traces, packing)
        squares_MG = squares(packing, _lengths(traces), (packing.num_micro_steps, ranks))
        sequences = partial(packed_sequences, traces, packing, budget, costs)
    counts = check_counts(counts, num_ranks=ranks, top_k=top_k)
    layers, experts = counts.shape[1], counts.shape[3]
    if (experts, top_k) != (model.num_experts, model.top_k) or layers > model.num_layers:
        raise ConfigError(
            f"{source} has {layers} layers, top-{top_k} of {experts} experts, the model {model.num_layers}, "
            f"top-{model.top_k} of {model.num_experts}; set them in [model]"
        )
    require_memory((1, counts.shape[0], layers), topology, model, source=source)
    previous_LE = None
    if given.previous_counts is not None:
        before = load_counts(Path(given.previous_counts))
        if before.shape[1::2] != (layers, experts):
            raise CountsError(
                f"{given.previous_counts} has {before.shape[1]} layers of {before.shape[3]} experts, {source} "
                f"{layers} of {experts}; expected the same"
            )
        previous_LE = before.sum(axis=(0, 2), dtype=np.int64)
    home_LE = np.tile(topology.contiguous_home_E(experts), (layers, 1))
    return BalancerInput(counts, topology, home_LE, previous_LE, squares_MG=squares_MG, sequences=sequences)


def squares(step: Packing | DrawnStep, lengths_S: NDArray[np.integer], shape: tuple[int, int]) -> NDArray[np.int64]:
    """int64 [M, G], sums of squared lengths of sequences."""
    squares_MG = np.zeros(shape, np.int64)
    np.add.at(squares_MG, (step.micro_step_S, step.rank_S), lengths_S.astype(np.int64) ** 2)
    return squares_MG

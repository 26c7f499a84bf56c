"""Steps that are read from files: of traces, whose sequences are packed, or of counts; and what is odd about them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError, CountsError, InputError, PlanError, shown
from foreroute.layout import Packing, pack_sequences
from foreroute.plan import PlanOptions, load_plan
from foreroute.plan.counts import (
    check_counts,
    counts_digest,
    load_counts,
    odd_tokens,
    packed_counts,
    sequence_counts,
    tokens_digest,
)
from foreroute.plan.received_rows import unrouted_of_sequences
from foreroute.plan.topology import Topology
from foreroute.planner.homes import place_homes
from foreroute.planner.packed_homes import PackedSequences
from foreroute.planner.plan_step import DEFAULTS
from foreroute.simulate.balancers import BalancerInput
from foreroute.trace import NO_VERSION, RoutingTrace, load
from foreroute.trace.container import digest
from foreroute.trace.operations import count_assignments

StepFiles = Path | Sequence[Path]
"""A counts file, or the traces of a step."""
TOKEN_BUDGET = 16_384
"""Most tokens of a rank in a micro-step, where sequences of traces are packed and nobody says how many."""


@dataclass(frozen=True, eq=False)
class RecordedStep(BalancerInput):
    """A step that was read.

    Attributes:
        traces: of the step; none where there are counts alone.
        packing: the rank and micro-step of each of their sequences.
    """

    traces: Sequence[RoutingTrace] = ()
    packing: Packing | None = None


def read_step(
    files: StepFiles,
    topology: Topology,
    costs: CostModel,
    *,
    before: StepFiles | None = None,
    plan_before: Path | None = None,
    token_budget: int | None = None,
    options: PlanOptions = DEFAULTS,
    whole_tokens: bool = False,
) -> RecordedStep:
    """Read a step, pack the sequences of traces, and warn of what hardly is one.

    Args:
        files: of the step.
        topology: ranks and slots.
        costs: of the model that the step is of.
        before: files of the step before, whose loads some balancers go by.
        plan_before: its plan, which says where the experts are; by default they are in blocks, as when a model is
            loaded.
        token_budget: most tokens of a rank in a micro-step, of traces; `TOKEN_BUDGET` by default.
        options: what the sequences of traces are packed by, and for that how many homes will move.
        whole_tokens: refuse counts that are not of whole tokens, of which others are warned.

    Raises:
        InputError: for files that cannot be read, are of another model or of other ranks, or, as those of the step
            before, of the step itself.
    """
    traces, packing, squares_MG, sequences, previous_LE = list[RoutingTrace](), None, None, None, None
    if isinstance(files, Path):
        top_k = costs.model.top_k if whole_tokens else None
        counts_MLGE = check_counts(load_counts(files), num_ranks=topology.num_ranks, top_k=top_k)
        _check_model(costs, counts_MLGE.shape[1::2], costs.model.top_k, str(files))
        _warn_of_odd_counts(counts_MLGE, costs.model.top_k, files)
        home_LE = _homes(plan_before, topology, counts_MLGE.shape[1::2], counts_digest(counts_MLGE))
    else:
        traces = _read_traces(files)
        spec, budget = traces[0].spec, token_budget or TOKEN_BUDGET
        spec.require_alike("a plan", "in Python, save trace.select_layers of those of one size, and plan that")
        _check_model(costs, (spec.num_layers, spec.num_experts), spec.top_k, ", ".join(map(str, files)))
        _warn_of_missing_rows(traces)
        home_LE = _homes(plan_before, topology, (spec.num_layers, spec.num_experts), tokens_digest(traces))
        # the packing becomes part of a plan: the trainer must cut the step as it was planned
        packing = _packed(traces, budget, topology.num_ranks, costs)
        counts_MLGE = check_counts(packed_counts(traces, packing))
        if options.packing == "routes":
            # for the homes that the step will have, as far as counts by length say them
            there_LE = home_LE
            if options.home_moves != 0:
                there_LE = place_homes(counts_MLGE, topology, home_LE, max_moves=options.home_moves)
            packing = _packed(traces, budget, topology.num_ranks, costs, home_LE=there_LE)
            counts_MLGE = check_counts(packed_counts(traces, packing))
        squares_MG = packing.sums(_lengths(traces) ** 2)
        sequences = partial(_packed_sequences, traces, packing, budget, costs)
    if before is not None:
        previous_LE = _loads_before(before, counts_MLGE, traces)
    step = counts_MLGE, topology, home_LE, previous_LE, costs, squares_MG, sequences
    return RecordedStep(*step, traces=traces, packing=packing)


def _read_traces(paths: Sequence[Path]) -> list[RoutingTrace]:
    """Read the traces of one step, and so of one model. Raises `InputError` for a trace that is there twice."""
    if not paths:
        raise InputError("a step has no trace; give its files, or a counts file")
    traces = [load(path) for path in paths]
    path_of: dict[str, Path] = {}
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


def _warn_of_other_weights(paths: Sequence[Path], traces: Sequence[RoutingTrace]) -> None:
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


def _warn_of_missing_rows(traces: Sequence[RoutingTrace]) -> None:
    """Warn of tokens without a route, beside the last of a response, which no engine computed."""
    missing = int(np.maximum(unrouted_of_sequences(traces) - 1, 0).sum())
    if missing:
        tokens = sum(len(trace.valid_N) for trace in traces)
        warnings.warn(
            f"{missing:,} of {tokens:,} tokens ({missing / tokens:.1%}) have no routes in these traces, as of a "
            "prefix that was not recorded: they are not counted, and a run routes them by itself, to ranks "
            "that nobody knows before. Record all rows",
            stacklevel=1,
        )


def _warn_of_odd_counts(counts_MLGE: NDArray[np.int32], top_k: int, source: Path) -> None:
    """Warn of counts that a step of this model does not have: layers route the same tokens, each to top_k experts."""
    odd = list(odd_tokens(counts_MLGE, top_k))
    if len(counts_MLGE) and counts_MLGE.min() < counts_MLGE.max():  # counts that are all alike say nothing of it
        if counts_MLGE.shape[2] > 1 and (counts_MLGE == counts_MLGE[:, :, :1]).all():
            odd.append("all ranks have the same counts, as if they were summed over ranks")
        if not (sent_G := counts_MLGE.any(axis=(0, 1, 3))).all():
            odd.append(f"ranks {', '.join(map(str, np.flatnonzero(~sent_G)[:8]))} have no tokens at all")
        if (same_L := (counts_MLGE[:, 1:] == counts_MLGE[:, :-1]).all(axis=(0, 2, 3))).any():
            odd.append(f"layers {same_L.argmax()} and {same_L.argmax() + 1} have the same counts")
    if odd:
        warnings.warn(
            f"{source}: {'; '.join(odd)}. Counts are those that each rank sends, whole, before any capacity drops some",
            stacklevel=2,
        )


def _check_model(costs: CostModel, shape: tuple[int, ...], top_k: int, source: str) -> None:
    """Refuse a description of another model than that of the files; `shape` are their layers and experts."""
    model, (num_layers, num_experts) = costs.model, shape
    if (model.num_experts, model.top_k) != (num_experts, top_k) or model.num_layers < num_layers:
        raise ConfigError(
            f"[model] describes {model.num_layers} routed layers with top-{model.top_k} of {model.num_experts} "
            f"experts, and the step of {source} has {num_layers} with top-{top_k} of {num_experts}; "
            "set num_layers, num_experts and top_k there"
        )


def _homes(before: Path | None, topology: Topology, shape: tuple[int, ...], own: str) -> NDArray[np.int16]:
    """Give the homes [L, E] of the plan before, or those of a model that was loaded: blocks of experts.

    `own` is the digest of the step itself, of its tokens or its counts.
    """
    if before is None:
        return topology.contiguous_home_LE(*shape)
    plan = load_plan(before)
    if plan.home_LE.shape != shape or plan.topology.num_ranks != topology.num_ranks:
        raise PlanError(
            f"{before} is a plan of {list(plan.home_LE.shape)} layers and experts on {plan.topology.num_ranks} "
            f"ranks; expected {list(shape)} on {topology.num_ranks}"
        )
    if own in (plan.tokens_digest, plan.counts_digest):
        raise InputError(f"{before} is a plan of the step itself; give that of the step before")
    return plan.home_LE


def _loads_before(
    files: StepFiles, counts_MLGE: NDArray[np.int32], traces: Sequence[RoutingTrace]
) -> NDArray[np.int64]:
    """Read assignments [L, E] of the step before, which is not this one."""
    num_layers, num_experts = counts_MLGE.shape[1::2]
    loads_LE: NDArray[np.int64]
    if isinstance(files, Path):
        first, loads_LE = files, load_counts(files).sum(axis=(0, 2), dtype=np.int64)
    else:
        first, own, parts = files[0], {digest(trace) for trace in traces}, list[NDArray[np.int64]]()
        for path, trace in zip(files, _read_traces(files), strict=True):
            if len(trace) and digest(trace) in own:
                raise InputError(f"{path} holds sequences of the step itself; give those of the step before")
            parts.append(count_assignments(trace, np.zeros(len(trace), np.int64)).sum(axis=0))
        loads_LE = np.sum(parts, axis=0)
    if loads_LE.shape != (num_layers, num_experts):
        raise CountsError(
            f"{first} has {loads_LE.shape[0]} layers of {loads_LE.shape[1]} experts, the step after it {num_layers} "
            f"of {num_experts}; expected the same model"
        )
    if np.array_equal(loads_LE, counts_MLGE.sum(axis=(0, 2), dtype=np.int64)):
        warnings.warn(
            f"{first} has the very counts of the step itself, by which “EPLB, previous step” would look as good as one "
            "that knew the step; give those of the step before",
            stacklevel=2,
        )
    return loads_LE


def _packed(
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


def _packed_sequences(
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


def _lengths(traces: Sequence[RoutingTrace]) -> NDArray[np.int64]:
    return np.concatenate([trace.lengths for trace in traces]).astype(np.int64)

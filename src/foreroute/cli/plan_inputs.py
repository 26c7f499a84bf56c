"""What `foreroute plan` is pointed at: counts or traces, a cluster, the step before; checked before it plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.cluster_file import Cluster, load_cluster
from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError, CountsError, InputError, PlanError
from foreroute.layout import Packing
from foreroute.plan import load_plan
from foreroute.plan.counts import COUNTS_FILE, check_counts, load_counts, packed_counts, tokens_digest
from foreroute.plan.topology import Topology
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.steps import TOKEN_BUDGET, packed, read_traces
from foreroute.trace import RoutedLayer, RoutingTrace
from foreroute.trace.operations import count_assignments


@dataclass(frozen=True, eq=False, kw_only=True)
class StepToPlan:
    """A step, ready to be planned.

    Attributes:
        counts_MLGE: int32.
        cluster: ranks, slots and the cost model.
        home_LE: int16, where the experts are now.
        previous_LE: int64, assignments of the step before, or None.
        facts: for people, by name.
        layers: L, of the traces; none where there are only counts.
        packing: the places of the sequences of the traces, or None.
        tokens_digest: of these sequences.
    """

    counts_MLGE: NDArray[np.int32]
    cluster: Cluster
    home_LE: NDArray[np.int16]
    previous_LE: NDArray[np.int64] | None
    facts: dict[str, str]
    layers: tuple[RoutedLayer, ...]
    packing: Packing | None
    tokens_digest: str

    @property
    def topology(self) -> Topology:
        """Ranks and slots."""
        return self.cluster.topology

    @property
    def problem(self) -> BalancerInput:
        """What balancers are given."""
        return BalancerInput(self.counts_MLGE, self.topology, self.home_LE, self.previous_LE, self.cluster.costs)


def read_step(
    topology: Path,
    *,
    traces: Sequence[Path] = (),
    counts: Path | None = None,
    previous_plan: Path | None = None,
    previous_step: Sequence[Path] = (),
    token_budget: int | None = None,
) -> StepToPlan:
    """Read everything, and pack the sequences of traces.

    Args:
        topology: a TOML file, see `foreroute.costs.cluster_file`.
        traces: of one step. Either these or `counts`.
        counts: a counts file.
        previous_plan: the plan of the step before, whose homes are where the experts are now.
        previous_step: traces, or one counts file, of the step before.
        token_budget: most tokens of a rank in a micro-step, for traces; None takes `TOKEN_BUDGET`.

    Raises:
        InputError: when a file is missing, damaged, or does not fit the others.
    """
    if bool(traces) == (counts is not None):
        raise InputError("give either trace files or --counts FILE: one of the two says what is to be planned")
    if counts is not None and token_budget is not None:
        raise InputError("--token-budget is for traces; --counts are packed already")
    cluster = load_cluster(topology)
    ranks, costs = cluster.topology, cluster.costs
    facts = {"input": ", ".join(str(path) for path in [*traces, counts] if path), "topology": str(topology)}
    if counts is not None:
        read: list[RoutingTrace] = []
        packing, counts_MLGE = None, check_counts(load_counts(counts), num_ranks=ranks.num_ranks)
        _check_model(costs, counts_MLGE.shape[3], None, topology)
    else:
        read = read_traces(traces)
        read[0].spec.require_alike("a plan", "in Python, save trace.select_layers of those of one size, and plan that")
        _check_model(costs, read[0].spec.num_experts, read[0].spec.top_k, topology)
        budget = token_budget or TOKEN_BUDGET
        packing, sequences = packed(read, budget, ranks.num_ranks, costs), sum(map(len, read))
        facts["packing"] = f"{sequences} sequences by length, at most {budget} tokens of a rank in a micro-step"
        counts_MLGE = check_counts(packed_counts(read, packing))
    shape = counts_MLGE.shape[1], counts_MLGE.shape[3]
    return StepToPlan(
        counts_MLGE=counts_MLGE,
        cluster=cluster,
        home_LE=_homes(previous_plan, ranks, shape),
        previous_LE=_loads(previous_step, shape) if previous_step else None,
        facts=facts,
        layers=read[0].spec.layers if read else (),
        packing=packing,
        tokens_digest=tokens_digest(read) if read else "",
    )


def _check_model(costs: CostModel, num_experts: int, top_k: int | None, source: Path) -> None:
    model = costs.model
    if model.num_experts != num_experts or (top_k is not None and model.top_k != top_k):
        routed = f"{num_experts} experts" if top_k is None else f"top-{top_k} of {num_experts} experts"
        raise ConfigError(
            f"{source} describes a model with top-{model.top_k} of {model.num_experts} experts, the input has "
            f"{routed}; set num_experts and top_k in its [model]"
        )


def _homes(previous: Path | None, topology: Topology, shape: tuple[int, int]) -> NDArray[np.int16]:
    if previous is None:
        return np.tile(topology.contiguous_home_E(shape[1]), (shape[0], 1))
    plan = load_plan(previous)
    if plan.home_LE.shape != shape or plan.topology.num_ranks != topology.num_ranks:
        raise PlanError(
            f"{previous} is a plan of {list(plan.home_LE.shape)} layers and experts on {plan.topology.num_ranks} "
            f"ranks; expected {list(shape)} on {topology.num_ranks}"
        )
    return plan.home_LE


def _loads(paths: Sequence[Path], shape: tuple[int, int]) -> NDArray[np.int64]:
    """Read assignments [L, E] of the step before, from a counts file or from traces."""
    if len(paths) == 1 and COUNTS_FILE.is_in(paths[0]):
        loads_LE: NDArray[np.int64] = load_counts(paths[0]).sum(axis=(0, 2), dtype=np.int64)
    else:
        parts = [count_assignments(trace, np.zeros(len(trace), np.int64)).sum(axis=0) for trace in read_traces(paths)]
        loads_LE = np.sum(parts, axis=0)
    if loads_LE.shape != shape:
        raise CountsError(
            f"{paths[0]} has {loads_LE.shape[0]} layers of {loads_LE.shape[1]} experts, the step to plan "
            f"{shape[0]} of {shape[1]}; expected the same model"
        )
    return loads_LE

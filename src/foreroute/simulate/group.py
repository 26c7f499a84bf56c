"""One expert-parallel group, with all its pipeline stages, through recompute and update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import BACKWARD, FORWARD, CostModel
from foreroute.plan.options import SlotUse
from foreroute.plan.topology import Topology
from foreroute.simulate.config import SimulateConfig
from foreroute.simulate.engine import Floats, Rules, Run, run
from foreroute.simulate.methods import Served
from foreroute.simulate.residence import Hosts, Visit
from foreroute.simulate.schedule import forward_only, layer_parts, one_forward_one_backward
from foreroute.simulate.steps import GroupStep
from foreroute.simulate.work import Compute, Path, Transfers, compute_of, free, transfers_of

FIRST_BLOCK, LONGEST_BLOCK = 1, 8
"""Micro-steps that the planner hands over at once: the first alone, then twice as many, up to the longest block."""


@dataclass(frozen=True, eq=False)
class Group:
    """What a group is to do, by one method, with all layers of the model.

    Attributes:
        compute: of all cells.
        recompute, update: transfers of the two stages.
        rules: how the cluster executes.
        parts: layers of each pipeline stage.
    """

    compute: Compute
    recompute: Transfers
    update: Transfers
    rules: Rules
    parts: list[range]

    @classmethod
    def of(cls, served: Served, step: GroupStep, config: SimulateConfig, topology: Topology, costs: CostModel) -> Group:
        """Price a served step. Layers that were drawn stand in turn for those of the model."""
        num_micro_steps, drawn = step.problem.counts_MLGE.shape[:2]
        layers = np.arange(costs.model.num_layers) % drawn
        compute = compute_of(served.assignments, (num_micro_steps, drawn), step.squares_MG, topology, costs)
        compute = replace(compute, leg_ML=compute.leg_ML[:, layers], experts_MLG2=compute.experts_MLG2[:, layers])
        hosts = Hosts.of(served.assignments, (num_micro_steps, drawn), served.home_LE, served.slots)
        parts = layer_parts(len(layers), config.cluster.pipeline)
        does = config.execution

        def transfers(orders: list[list[Visit]], path: Path) -> Transfers:
            return _joined(
                [
                    transfers_of(
                        hosts,
                        layers[part.start : part.stop],
                        order,
                        path,
                        topology,
                        costs,
                        prefetch=does.prefetch,
                        every_micro_step=does.gradient_return == "micro-step",
                    )
                    for order, part in zip(orders, parts, strict=True)
                ]
            )

        return cls(
            compute,
            transfers([forward_only(num_micro_steps)] * len(parts), does.recompute_path),
            transfers(update_orders(len(parts), num_micro_steps), does.update_path),
            rules_of(config, topology, served.slots),
            parts,
        )

    def freed(self) -> Group:
        """The same with transfers that cost nothing."""
        return replace(self, recompute=free(self.recompute), update=free(self.update))

    def bound(self, step: GroupStep, topology: Topology, costs: CostModel) -> Group:
        """The same at the least cost that any plan could have.

        The experts' whole work in one piece, spread evenly over all ranks; all-to-alls that take their latency alone;
        free transfers. It is `costs.figures.least_seconds`, cell by cell.
        """
        loads_MLE = step.problem.counts_MLGE.sum(axis=2, dtype=np.int64)
        layers = np.arange(self.compute.leg_ML.shape[1]) % loads_MLE.shape[1]
        experts = [
            costs.expert_seconds(loads_MLE, one).sum(axis=2)[:, layers] / topology.num_ranks
            for one in (FORWARD, BACKWARD)
        ]
        even_MLG2 = np.broadcast_to(np.stack(experts, -1)[:, :, None], self.compute.experts_MLG2.shape)
        leg_ML = np.full(self.compute.leg_ML.shape, costs.prices(topology).latency_s)
        return replace(self.freed(), compute=replace(self.compute, leg_ML=leg_ML, experts_MLG2=even_MLG2))

    def run(self, ready_M: Floats | None = None) -> tuple[Run, Run]:
        """Recompute and update.

        Args:
            ready_M: seconds from the start of the recompute when the plan of each micro-step is there.
        """
        num_micro_steps = len(self.compute.leg_ML)
        orders = [forward_only(num_micro_steps)] * len(self.parts)
        first = run(orders, self.parts, self.compute, self.recompute, self.rules, stage=0, ready_M=ready_M)
        orders = update_orders(len(self.parts), num_micro_steps)
        return first, run(orders, self.parts, self.compute, self.update, self.rules, stage=1)


def rules_of(config: SimulateConfig, topology: Topology, slots: SlotUse) -> Rules:
    """For the engine."""
    return Rules(
        ranks_per_node=topology.ranks_per_node,
        processors_per_node=config.cluster.processors_per_node or topology.ranks_per_node,
        overlap=config.execution.overlap,
        prefetch=config.execution.prefetch,
        keeps_slots=slots == "layer",
    )


def plan_ready(num_micro_steps: int, planning_s: float, lead_s: float) -> NDArray[np.float64]:
    """float64 [M], seconds from the start of the recompute until the plan of each micro-step is there.

    The planner hands over whole blocks of micro-steps, and takes as long for one as for another.

    Args:
        num_micro_steps: M.
        planning_s: of the whole step.
        lead_s: by which it begins before the recompute.
    """
    ready_M, begin = np.empty(num_micro_steps), 0
    while begin < num_micro_steps:
        end = min(max(2 * begin, FIRST_BLOCK), begin + LONGEST_BLOCK, num_micro_steps)
        ready_M[begin:end] = end / num_micro_steps * planning_s
        begin = end
    return np.maximum(ready_M - lead_s, 0.0)


def update_orders(num_stages: int, num_micro_steps: int) -> list[list[Visit]]:
    """1F1B, for each pipeline stage."""
    return [one_forward_one_backward(p, num_stages, num_micro_steps) for p in range(num_stages)]


def _joined(parts: Sequence[Transfers]) -> Transfers:
    """Of all pipeline stages, along the layers."""
    axes = {"host_KMLG": 2, "direct_KMLG4": 2, "gradient_MLG4": 1}
    return Transfers(
        **{f.name: np.concatenate([getattr(p, f.name) for p in parts], axis=axes[f.name]) for f in fields(Transfers)}
    )

"""The plan of one RL step: where every expert is served in every cell, and how many tokens go where.

Axis letters: M micro-steps, L layers, G ranks, E logical experts, R replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import CountsError, PlanError, shown
from foreroute.files.container import TensorSchema
from foreroute.layout import Packing
from foreroute.plan.capabilities import FetchPath
from foreroute.plan.counts import counts_digest, packed_counts, tokens_digest
from foreroute.plan.hosts import CellPlan, Hosts
from foreroute.plan.options import PASS_NAMES, PassName, SlotSharing
from foreroute.plan.topology import Topology
from foreroute.trace.container import RoutingTrace

TENSORS = {
    "previous_home_LE": TensorSchema("I16", "LE"),
    "home_LE": TensorSchema("I16", "LE"),
    "offsets": TensorSchema("I64", "C"),
    "expert_R": TensorSchema("I16", "R"),
    "rank_R": TensorSchema("I16", "R"),
    "slot_R": TensorSchema("I16", "R"),
    "fetched_R": TensorSchema("BOOL", "R"),
    "tokens_RG": TensorSchema("I32", "RG"),
    "max_load_ML": TensorSchema("I64", "ML"),
    "bound_ML": TensorSchema("F64", "ML"),
    "micro_step_S": TensorSchema("I32", "S"),
    "sequence_rank_S": TensorSchema("I32", "S"),
}
"""The arrays of a plan; those of the packing, which come last, are empty without one."""
LEAST_GAIN = 0.01
"""A pass in which a plan saves a smaller share is executed with every expert at its home."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Homes, replicas and token splits of a whole step, and what executing them needs.

    Attributes:
        topology: what it was planned for.
        previous_home_LE: int16 [L, E], the homes before the step.
        hosts: of all cells of the step, without room; each rank is home to E / G experts of each layer.
        max_load_ML: int64 [M, L], assignments of the slowest rank.
        bound_ML: float64 [M, L], no plan of these homes and slots serves a cell with less on its slowest rank.
        counts_digest: 128 bit, hexadecimal, of the counts that were planned; the executor compares it.
        slots: what becomes of the content of slots between cells, as in `PlanOptions`.
        packing: the rank and micro-step of every sequence, where sequences were planned; None for bare counts.
        tokens_digest: `tokens_digest` of these sequences; empty without a packing.
        gains: of both passes, the share that the plan saves of the modelled seconds with every expert at its home, when
            it has paid for what a planned step takes once; empty where nothing was priced.
        priced_paths: the path of replicas' weights that prices are of; None where nothing was priced.
        unpriced: what a planned step takes once and `gains` have at 0: "planning", "votes".
    """

    topology: Topology
    previous_home_LE: NDArray[np.int16]
    hosts: Hosts
    max_load_ML: NDArray[np.int64]
    bound_ML: NDArray[np.float64]
    counts_digest: str
    slots: SlotSharing
    packing: Packing | None = None
    tokens_digest: str = ""
    gains: Mapping[PassName, float] = field(default_factory=dict)
    priced_paths: FetchPath | None = None
    unpriced: tuple[str, ...] = ()

    def __repr__(self) -> str:
        num_micro_steps, num_layers, num_experts = self.shape
        moved = int((self.home_LE != self.previous_home_LE).sum())
        return (
            f"StepPlan({num_micro_steps} micro-steps of {num_layers} layers, {num_experts} experts on "
            f"{self.topology.num_ranks} ranks, {len(self.hosts.expert_R)} replicas, {moved} moved homes)"
        )

    @property
    def home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the homes during the step."""
        return self.hosts.home_LE

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, L, E)."""
        num_layers, num_experts = self.home_LE.shape
        return len(self.max_load_ML), num_layers, num_experts

    @property
    def num_replicas_ML(self) -> NDArray[np.int64]:
        """int64 [M, L]."""
        return np.diff(self.hosts.offsets).reshape(self.shape[:2])

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """The arrays that `TENSORS` declares."""
        packing = self.packing
        packed = ((), ()) if packing is None else (packing.micro_step_S, packing.rank_S)
        micro_step_S, sequence_rank_S = (np.asarray(each_S, np.int32) for each_S in packed)
        return {
            "previous_home_LE": self.previous_home_LE,
            **self.hosts._asdict(),
            "max_load_ML": self.max_load_ML,
            "bound_ML": self.bound_ML,
            "micro_step_S": micro_step_S,
            "sequence_rank_S": sequence_rank_S,
        }

    def cell(self, micro_step: int, layer: int) -> CellPlan:
        """Return the plan of one cell, as views; `PlanError` when the step has no such cell."""
        if not (0 <= micro_step < self.shape[0] and 0 <= layer < self.shape[1]):
            raise PlanError(
                f"the plan has {self.shape[0]} micro-steps of {self.shape[1]} layers, no ({micro_step}, {layer})"
            )
        return self.hosts.cell(micro_step, layer)

    def is_at_home(self, pass_name: PassName) -> bool:
        """Say whether every expert serves at its home in a pass: the plan has no replica, or saves too little there."""
        if pass_name not in PASS_NAMES:
            raise PlanError(f"a pass is {shown(pass_name)}; expected one of {', '.join(PASS_NAMES)}")
        # what was never priced is executed: somebody asked for it
        return len(self.hosts.expert_R) == 0 or self.gains.get(pass_name, 1.0) < LEAST_GAIN

    def in_pass(self, pass_name: PassName) -> StepPlan:
        """Return what a pass executes: this plan, or its homes alone beside the loads and bounds of this one."""
        if not self.is_at_home(pass_name):
            return self
        return replace(self, hosts=Hosts.with_room(self.home_LE, self.shape[0], self.topology.num_ranks, 0))

    def decision(self, pass_name: PassName) -> str:
        """State the decision on a pass, and why, in words."""
        is_at_home = self.is_at_home(pass_name)
        if len(self.hosts.expert_R) == 0:
            return "at homes: the plan has no replicas"
        if pass_name not in self.gains:
            return "by the plan: its gain is not known"
        moved = bool((self.home_LE != self.previous_home_LE).any())
        homes = "the homes that experts move to" if moved else "homes"
        gain = f"{abs(self.gains[pass_name]):.1%} of the modelled time at {homes}"
        if not is_at_home:
            free = f", {' and '.join(self.unpriced)} at no price" * bool(self.unpriced)
            return f"by the plan: it saves {gain}{free}"
        verb = "cost" if self.gains[pass_name] < 0 else "save"
        return f"at homes: the plan would {verb} {gain}; it must save {LEAST_GAIN:.0%} or more"

    def counts_of(self, traces: RoutingTrace | Sequence[RoutingTrace]) -> NDArray[np.int32]:
        """Count the assignments of these sequences under the plan's packing: int32 [M, L, G, E].

        Raises:
            PlanError: when the plan has no packing, or was made for other tokens.
            CountsError: when the traces are of more than one model.
        """
        if self.packing is None:
            raise PlanError("the plan was made for counts and has no packing; hand in the counts")
        found = tokens_digest(traces)
        if found != self.tokens_digest:
            raise PlanError(
                f"the plan was made for tokens with digest {self.tokens_digest}, these have {found}; plan these "
                "sequences, or hand in those that were planned, in their order"
            )
        return packed_counts(traces, self.packing)

    def require_counts(self, counts_MLGE: NDArray[np.integer]) -> None:
        """Raise `CountsError` unless counts, integers [M, L, G, E], are those that the plan was made for."""
        expected = (*self.shape[:2], self.topology.num_ranks, self.shape[2])
        if counts_MLGE.shape != expected or counts_MLGE.dtype.kind not in "iu":
            raise CountsError(
                f"counts are {counts_MLGE.dtype} {list(counts_MLGE.shape)}, the plan is for integers {list(expected)}"
            )
        found = counts_digest(counts_MLGE)
        if found != self.counts_digest:
            own = "" if self.packing is None else " (its traces have the sequences packing.sequences(micro_step, rank))"
            raise CountsError(
                f"counts have digest {found}, the plan was made for counts with digest {self.counts_digest}; hand in "
                f"the counts of the plan{own}, or plan these counts"
            )

"""Steps that were really run and timed, for fitting costs: a file of counts, plans and seconds.

JSON Lines, one measurement a line:

    {"counts": "counts.safetensors", "plan": "plan.safetensors", "stage": "update", "seconds": 1.62}

`counts` is a counts file, [M, L, G, E]; `plan` a plan file of these counts, or null where
every expert was served at its home, contiguously; `stage` "recompute" (forward passes of all micro-steps) or "update"
(forward, and backward with activations computed anew). Paths are relative to the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foreroute.errors import ConfigError, InputError
from foreroute.files import parse_json, read_text
from foreroute.plan import load_counts, load_plan, verify
from foreroute.plan.counts import check_counts
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Topology
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.methods import ServedStep, all_at_home
from foreroute.simulate.steps import GroupStep

MOST_BYTES = 1 << 20
"""Most bytes of the file: thousands of measurements."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """One timed stage of one step.

    Attributes:
        name: for people.
        step: what was run.
        served: how.
        stage: position in `costs.STAGES`: 0 recompute, 1 update.
        seconds: wall time of the slowest rank.
    """

    name: str
    step: GroupStep
    served: ServedStep
    stage: int
    seconds: float

    @classmethod
    def of(
        cls, name: str, counts: Any, plan: StepPlan | None, topology: Topology, stage: str, seconds: float
    ) -> Measurement:
        """From arrays.

        Args:
            name: for people.
            counts: integers [M, L, G, E].
            plan: of these counts, or None for contiguous homes alone.
            topology: of the ranks.
            stage: "recompute" or "update".
            seconds: wall time.

        Raises:
            CountsError, PlanError: when the counts are none, or the plan is not of them.
        """
        counts_MLGE = check_counts(counts, num_ranks=topology.num_ranks)
        home_LE = np.tile(topology.contiguous_home_E(counts_MLGE.shape[3]), (counts_MLGE.shape[1], 1))
        problem = BalancerInput(counts_MLGE, topology, home_LE)
        if plan is None:
            served = all_at_home(problem)
        else:
            verify(plan, counts_MLGE)
            cells = [plan.cell(*cell) for cell in np.ndindex(*plan.shape[:2])]
            served = ServedStep(counts_MLGE, plan.previous_home_LE, plan.slots, cells)
        return cls(name, GroupStep(problem, None), served, ("recompute", "update").index(stage), seconds)


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    counts: str
    plan: str | None
    stage: Literal["recompute", "update"]
    seconds: Annotated[float, Field(gt=0)]


def load_measurements(path: Path, topology: Topology) -> list[Measurement]:
    """Read a file of measurements.

    Raises:
        ConfigError: when the file is missing or no JSON, or a measurement has unknown keys or wrong values; with the
            number of its line.
        CountsError, PlanError: when counts or plans are damaged, or do not fit each other.
    """
    measured = []
    # at line feeds alone: JSON text may hold other separators
    lines = read_text(path, ConfigError, most_bytes=MOST_BYTES).split("\n")
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = _Line.model_validate(parse_json(text, ConfigError, name=f"{path}, line {number}"))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
            raise ConfigError(
                f"{path}: line {number} is not valid: {problems}. Expected counts, plan (or null), stage "
                '("recompute" or "update") and seconds'
            ) from error
        counts = load_counts(path.parent / line.counts)
        plan = None if line.plan is None else load_plan(path.parent / line.plan)
        name = f"{line.plan or line.counts}, {line.stage}"
        try:
            measured.append(Measurement.of(name, counts, plan, topology, line.stage, line.seconds))
        except InputError as error:
            raise type(error)(f"{path}: line {number}: {error}") from error
    return measured

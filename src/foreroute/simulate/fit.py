"""Rates of hardware from measured steps.

Steps that were really run and timed come from a file, JSON Lines, one measurement a line:

    {"counts": "counts.safetensors", "plan": "plan.safetensors", "pass_name": "update", "seconds": 1.62}

`counts` is a counts file, [M, L, G, E]; `plan` a plan file of these counts, or null where every expert was served at
its home, contiguously; `pass_name` "recompute" (forward passes of all micro-steps) or "update" (forward, and backward
with activations computed anew). Paths are relative to the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.cluster_file import Cluster
from foreroute.costs.fitting import find_rates, require_distinct_effects, value_of
from foreroute.costs.model import CostModel, Hardware
from foreroute.errors import ConfigError, InputError
from foreroute.files.config_file import Positive, Section, checked
from foreroute.files.regular import parse_json, read_text
from foreroute.plan import load_plan, verify
from foreroute.plan.options import PASS_NAMES, PassName
from foreroute.plan.step_plan import StepPlan
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.config import SimulateConfig, parse_config
from foreroute.simulate.ep_group import EPGroup
from foreroute.simulate.methods import ServedStep, all_at_home
from foreroute.simulate.step_files import read_step

Floats = NDArray[np.float64]
FITTABLE = (
    "gemm_flops_per_s",
    "attention_flops_per_s",
    "memory_bytes_per_s",
    "layer_s",
    "replica_s",
    "node_bytes_per_s",
    "cluster_bytes_per_s",
    "host_bytes_per_s",
    "node_latency_s",
    "cluster_latency_s",
)
DEFAULT_RATES = ("gemm_flops_per_s", "layer_s")
"""The rates that are fitted where none is named."""
MOST_BYTES = 1 << 20
"""Most bytes of a file of measurements: thousands of them."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """One timed pass of one step: 0 recompute, 1 update, as in `costs.PASSES`; wall time of the slowest rank."""

    name: str
    step: BalancerInput
    served: ServedStep
    pass_index: int
    seconds: float

    @classmethod
    def of(
        cls, name: str, step: BalancerInput, plan: StepPlan | None, pass_name: PassName, seconds: float
    ) -> Measurement:
        """Check the plan of a step, None for homes alone. Raises `CountsError` or `PlanError` for that of another."""
        if plan is None:
            served = all_at_home(step)
        else:
            verify(plan, step.counts_MLGE)
            served = ServedStep.of(plan, step)
        return cls(name, step, served, PASS_NAMES.index(pass_name), seconds)


class _Line(Section):
    counts: str
    plan: str | None
    pass_name: PassName
    seconds: Positive


def load_measurements(path: Path, cluster: Cluster) -> list[Measurement]:
    """Read a file of measurements.

    Raises:
        ConfigError: when the file is missing or no JSON, or a measurement has unknown keys or wrong values, or is of
            another model; with the number of its line.
        CountsError, PlanError: when counts or plans are damaged, or do not fit each other.
    """
    measured = []
    # at line feeds alone: JSON text may hold other separators
    for number, text in enumerate(read_text(path, ConfigError, most_bytes=MOST_BYTES).split("\n"), start=1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        line = checked(_Line, parse_json(text, ConfigError, name=where), source=where)
        name = f"{line.plan or line.counts}, {line.pass_name}"
        try:
            step = read_step(path.parent / line.counts, cluster.topology, cluster.costs)
            plan = None if line.plan is None else load_plan(path.parent / line.plan)
            measured.append(Measurement.of(name, step, plan, line.pass_name, line.seconds))
        except InputError as error:
            raise type(error)(f"{where}: {error}") from error
    return measured


@dataclass(frozen=True, kw_only=True)
class FitRecord:
    """Outcome of a fit."""

    hardware: Hardware  # with the fitted rates; what was not fitted is as configured
    parameters: dict[str, float]  # the fitted rates by name
    names: tuple[str, ...]  # of the measurements
    # of each measurement
    measured_s: tuple[float, ...]
    predicted_s: tuple[float, ...]
    median_error: float  # median of |predicted - measured| / measured
    worst_error: float  # the largest
    before: Mapping[str, float]  # the rates by name before the fit

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def fit_config(
    config: SimulateConfig, path: Path, parameters: Sequence[str] = DEFAULT_RATES
) -> tuple[SimulateConfig, FitRecord]:
    """The configuration with rates fitted to the measurements of a file, and what came out. Raises as `fit`."""
    found = fit(load_measurements(path, config.described()), config, parameters)
    values = config.model_dump()
    for name, value in found.parameters.items():
        table = "hardware" if hasattr(found.hardware, name) else "links"
        # a preset stays, and what was fitted overrides it
        values[table] = {**values[table], name: value}
    return parse_config(values, source=f"{path}, fitted"), found


def fit(
    measured: Sequence[Measurement], config: SimulateConfig, parameters: Sequence[str] = DEFAULT_RATES
) -> FitRecord:
    """Fit rates of the configured hardware to measurements, by least squares of relative errors.

    Args:
        measured: at least as many as parameters.
        config: model, cluster and execution, and the rates to begin from.
        parameters: of `FITTABLE`, which to fit.

    Raises:
        ConfigError: when a parameter is unknown or 0, has no effect on any measurement or cannot be told from others,
            or there are fewer measurements than parameters.
    """
    if unknown := [name for name in parameters if name not in FITTABLE]:
        raise ConfigError(f"{', '.join(unknown)} cannot be fitted; expected some of {', '.join(FITTABLE)}")
    # as many parameters as measurements fit anything
    if len(measured) < len(parameters) or not parameters:
        raise ConfigError(
            f"{len(measured)} measurements cannot tell {len(parameters)} parameters; measure more steps, or fit fewer"
        )
    costs = config.described().costs
    if nothing := [name for name in parameters if value_of(costs.hardware, name) == 0]:
        raise ConfigError(f"{', '.join(nothing)} begins at 0, which no factor changes; configure a first value above 0")
    seconds_V = np.array([one.seconds for one in measured])
    found = find_rates(costs, parameters, lambda costs: predict(measured, config, costs), seconds_V, seconds_V)
    require_distinct_effects(found.share_VK, parameters)
    predicted_V = predict(measured, config, found.costs)
    errors_V = np.abs(predicted_V / seconds_V - 1)
    return FitRecord(
        hardware=found.costs.hardware,
        parameters={name: value_of(found.costs.hardware, name) for name in parameters},
        names=tuple(one.name for one in measured),
        measured_s=tuple(seconds_V.tolist()),
        predicted_s=tuple(predicted_V.tolist()),
        median_error=float(np.median(errors_V)),
        worst_error=float(errors_V.max()),
        before={name: value_of(costs.hardware, name) for name in parameters},
    )


def predict(measured: Sequence[Measurement], config: SimulateConfig, costs: CostModel) -> Floats:
    """float64 [measurements], simulated seconds."""
    groups = [EPGroup.of(one.served, one.step, costs, overlap=config.execution.overlap) for one in measured]
    return np.array([group.run()[one.pass_index].end_s for group, one in zip(groups, measured, strict=True)])

"""Numbers and run facts as a reader meets them. Pure text; escaping is the template's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foreroute.report.records import Run
from foreroute.report.table import SummaryRow

ABSENT = "–"  # noqa: RUF001  an en dash in a table cell: never measured
GAP = "\N{NO-BREAK SPACE}"

ROUTING = {
    "none": "No routing replay: the trainer routes every token itself",
    "R2": "R2: the update replays the experts that the trainer's own recompute pass selected",
    "R3": "R3, rollout routing replay: recompute and update replay the experts that the rollout engine selected",
    "R3+weights": "R3 with gate weights: recompute and update replay the engine's experts, and the weight of each",
}


def describe(run: Run) -> list[str]:
    """What a run is, in short phrases: routing, precision, the settings that change its mismatch, its length."""
    rl = run.config["rl"]
    first, last = run.steps[0].step, run.steps[-1].step
    facts = [ROUTING.get(run.routing, f"Routing {run.routing}"), f"rollout in {run.precision}"]
    facts += _method(rl)
    if "mini_steps" in rl:
        facts.append(f"{rl['mini_steps']} mini-step{'' if rl['mini_steps'] == 1 else 's'} per step")
    if "learning_rate" in rl:
        facts.append(f"learning rate {rl['learning_rate']}")
    facts += _devices(run)
    facts += [f"seed {run.seed}", f"steps {first} to {last}" if last > first else f"step {first} only"]
    return [*facts, f"measured both ways at {len(run.paired_steps())} of {len(run.steps)} steps"]


def _devices(run: Run) -> list[str]:
    """Every device that steps ran on, in the order of the steps, with the most memory that one of them took."""
    most: dict[str, int] = {}
    for step in run.steps:
        if step.device is not None:
            name = f"CPU, {step.device.name}" if step.device.kind == "cpu" else step.device.name
            most[name] = max(most.get(name, 0), step.device.peak_memory_bytes or 0)
    return [f"on {name}{f', up to {peak / 1e9:.2f} GB' if peak else ''}" for name, peak in most.items()]


def _method(rl: Mapping[str, Any]) -> list[str]:
    """The loss, and what is added to it, where it was recorded."""
    correction, rejection = rl.get("correction", {}), rl.get("rejection", {})
    facts = [f"method {rl['method']}"] if "method" in rl else []
    if correction.get("kind", "none") != "none":
        low, high = correction.get("low"), f"{correction['high']:g}"
        facts.append(f"correction {correction['kind']} {f'at {high}' if low is None else f'outside {low:g} to {high}'}")
    if rejection.get("kind", "none") != "none":
        facts.append(f"rejection outside {rejection['low']:g} to {rejection['high']:g}")
    if rl.get("kl_coefficient"):
        facts.append(f"KL coefficient {rl['kl_coefficient']:g}")
    if rl.get("router") == "frozen":
        facts.append("frozen routers")
    return facts


def pace(row: SummaryRow) -> str:
    """Where the time of a step goes, on average."""
    if row.seconds_per_step is None:
        return ""
    phases = ", ".join(f"{phase} {seconds(value)}" for phase, value in row.seconds_by_phase.items())
    return f"{seconds(row.seconds_per_step)} per step: {phases}"


def reward(value: float | None) -> str:
    """Three decimals."""
    return ABSENT if value is None else f"{value:.3f}"


def percentage(share: float | None) -> str:
    """0.1234 -> 12.3 %. Shares too small for three digits keep one."""
    if share is None:
        return ABSENT
    percent = 100 * share
    if percent == 0 or not math.isfinite(percent):
        return f"{percent:.0f}{GAP}%"
    return (
        f"{percent:.1f}{GAP}%"
        if percent >= 10
        else f"{percent:.2f}{GAP}%"
        if percent >= 0.1
        else f"{percent:.1g}{GAP}%"
    )


def scientific(value: float | None) -> str:
    """0.00123 -> 1.23e-3."""
    if value is None:
        return ABSENT
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def seconds(value: float | None) -> str:
    """Two decimals, or three digits where that is too many or too few."""
    return ABSENT if value is None else f"{value:.2f}{GAP}s" if 0.1 <= value < 10 else f"{value:.3g}{GAP}s"


def duration(value: float) -> str:
    """A short time in the unit that suits it: 3.21 s, 45.6 ms, 78.9 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g}{GAP}{unit}"
    return f"{value * 1e6:.3g}{GAP}us"


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested configuration as text by dotted key."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = "none" if value is None else str(value)
    return flat

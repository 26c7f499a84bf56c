"""Run folders -> one self-contained HTML page: nothing in it is loaded from elsewhere, and nothing in it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreroute.records import Run, read_runs
from foreroute.report.finding import run_finding, run_tiles
from foreroute.report.format import Command, flattened, percentage, quoted, reward, scientific, step_time
from foreroute.report.run_rows import WINDOW, SummaryRow, alarm_rows, load_rows, runs_with_alarms, summary_rows
from foreroute.report.template import write_html

ROUTING = {
    "none": "No routing replay: the trainer routes every token itself",
    "R2": "R2: the update replays the experts that the trainer's own recompute pass selected",
    "R3": "R3, rollout routing replay: recompute and update replay the experts that the rollout engine selected",
    "R3+weights": "R3 with gate weights: recompute and update replay the engine's experts, and the weight of each",
}
KEPT = ("rollouts", "checkpoints")
"""Folders of a run that a diagnosis needs."""


def write_report(run_folders: Sequence[Path], target: Path) -> Path:
    """Write the report of one run, or the comparison of several, to `target`; a report that is there is replaced.

    Raises:
        InputError: when no folder is given, `target` cannot be written or is no page of ours, or the `report` extra is
            not installed.
        RunFolderError: when a run folder is missing or damaged.
    """
    wording = {"percentage": percentage, "reward": reward, "scientific": scientific, "step_time": step_time}
    return write_html(target, "run.html.j2", lambda: _values(read_runs(run_folders)), wording)


def _values(runs: Sequence[Run]) -> dict[str, Any]:
    from foreroute.report import load_plots, mismatch_plots, training_plots
    from foreroute.report.figure import Key, colour_of, dashes_of

    rows = summary_rows(runs)
    names = [Key(run.label, colour_of(runs, place), dashes_of(place)) for place, run in enumerate(runs)]
    return {
        "title": f"Run {runs[0].label}" if len(runs) == 1 else f"Comparison of {len(runs)} runs",
        "finding": run_finding(runs),
        "tiles": run_tiles(runs),
        "runs": [
            {"run": run, "key": key, "facts": describe(run, row)}
            for run, key, row in zip(runs, names, rows, strict=True)
        ],
        "rows": rows,
        "colours": [key.colour for key in names],
        "window": WINDOW,
        "notes": [*_reading_notes(runs), *_table_notes(rows)],
        "plots": [
            *mismatch_plots.mismatch_plots(runs),
            *training_plots.reward_plots(runs),
            *training_plots.update_plots(runs),
            load_plots.expert_load(runs),
        ],
        "alarm_rows": alarm_rows(runs),
        "runs_with_alarms": runs_with_alarms(runs),
        "load_rows": load_rows(runs),
        "load_plots": load_plots.rank_load_plots(runs),
        "commands": [command for run in runs for command in commands_of(run)],
        "config": _config_lines(runs),
    }


def describe(run: Run, row: SummaryRow) -> dict[str, str]:
    """What a run is, by topic: routing, engine, the settings that change its mismatch, device, length, pace."""
    rl = run.config["rl"]
    first, last = run.steps[0].step, run.steps[-1].step
    batches = rl.get("mini_steps")
    update = [f"{batches} mini-batch{'' if batches == 1 else 'es'} per step"] if batches else []
    update += [f"learning rate {rl['learning_rate']}"] if "learning_rate" in rl else []
    phases = ", ".join(f"{phase} {step_time(value)}" for phase, value in row.seconds_by_phase.items())
    facts = {
        "routing": ROUTING.get(run.routing, f"Routing {run.routing}"),
        "rollout": f"in {run.precision}",
        "loss": ", ".join(_loss(rl)),
        "update": ", ".join(update),
        "device": "; ".join(_devices(run)),
        "steps": f"{f'{first} to {last}' if last > first else f'{first} only'}, seed {run.seed}; measured both ways at "
        f"{row.paired_steps} of {row.steps}",
        "a step takes": f"{step_time(row.seconds_per_step)}: {phases}" if row.seconds_per_step else "",
    }
    return {topic: words for topic, words in facts.items() if words}


def commands_of(run: Run) -> list[Command]:
    """The command that diagnoses a run, where the run kept what that needs: a rollout of a checkpoint's weights."""
    rollouts, checkpoints = ({path.name for path in (run.folder / name).glob("step-*")} for name in KEPT)
    if not rollouts & checkpoints:
        return []
    page = run.folder / "doctor.html"
    return [(f"Diagnose {run.label}:", f"foreroute doctor --model {quoted(run.folder)} --output {quoted(page)}")]


def _loss(rl: Mapping[str, Any]) -> list[str]:
    """The method, and what is added to it, where it was recorded."""
    correction, rejection = rl.get("correction", {}), rl.get("rejection", {})
    facts = [str(rl["method"])] if "method" in rl else []
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


def _devices(run: Run) -> list[str]:
    """Every device that steps ran on, in the order of the steps, with the most memory that one of them took."""
    most: dict[str, int] = {}
    for step in run.steps:
        if device := step.device:
            name = f"CPU, {device.name}" if device.kind == "cpu" else device.name
            most[name] = max(most.get(name, 0), device.peak_memory_bytes or 0)
    return [f"{name}{f', up to {peak / 1e9:.2f} GB' if peak else ''}" for name, peak in most.items()]


def _reading_notes(runs: Sequence[Run]) -> list[str]:
    notes = [f"{run.label}: {note}" for run in runs for note in run.notes]
    for run in runs:
        failures = sum(step.reward_failures or 0 for step in run.steps)
        if failures:
            notes.append(
                f"{run.label}: {failures} responses got no reward because a function failed; their groups are left out."
            )
    return notes


def _table_notes(rows: Sequence[SummaryRow]) -> list[str]:
    notes = []
    for row in rows:
        if row.routing == "R3+weights":
            notes.append(f"{row.run}: replays the engine's gate weights too, where it says with replay.")
        if not row.paired_steps and set(row.k3.values()) == {None}:
            notes.append(f"{row.run}: the mismatch of trainer and rollout engine was not recorded.")
        elif not row.paired_steps:
            notes.append(
                f"{row.run}: at no step was the mismatch measured both without and with replay, "
                "so what it shows is the average over the steps that were measured one way."
            )
        if row.steps < 2 * WINDOW:
            notes.append(f"{row.run}: has {row.steps} steps, so its first and last {WINDOW} steps overlap.")
    return notes


def _config_lines(runs: Sequence[Run]) -> list[tuple[str, list[str], bool]]:
    """Every key of every configuration with its value in each run, those that differ between runs first."""
    flat = [flattened(run.config) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    found = {key: [values.get(key, "not set") for values in flat] for key in keys}
    lines = [(key, values, len(set(values)) > 1) for key, values in found.items()]
    return sorted(lines, key=lambda line: not line[2])

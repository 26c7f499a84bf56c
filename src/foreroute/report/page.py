"""Run folders -> one self-contained HTML page: nothing in it is loaded from elsewhere, and nothing in it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreroute.report.alarm_rows import alarm_rows, watched
from foreroute.report.load_rows import load_rows
from foreroute.report.reading import read_runs
from foreroute.report.records import Run
from foreroute.report.table import WINDOW, SummaryRow, summary_rows
from foreroute.report.template import write_html
from foreroute.report.wording import describe, flattened, pace, percentage, reward, scientific, seconds


def write_report(run_folders: Sequence[Path], target: Path) -> Path:
    """Write the report of one run, or the comparison of several, to `target`; a report that is there is replaced.

    Raises:
        InputError: when no folder is given, `target` cannot be written or is no page of ours, or the `report` extra is
            not installed.
        RunFolderError: when a run folder is missing or damaged.
    """
    wording = {"percentage": percentage, "reward": reward, "scientific": scientific, "seconds": seconds}
    return write_html(target, "page.html.j2", lambda: _values(read_runs(run_folders)), wording)


@dataclass(frozen=True)
class _ConfigLine:
    """One key of the configuration, with its value in each run."""

    key: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def _values(runs: Sequence[Run]) -> dict[str, Any]:
    from foreroute.report import curves, distributions
    from foreroute.report.canvas import colour_of
    from foreroute.report.objective import objective_plots
    from foreroute.report.rank_load import rank_load_plots

    rows = summary_rows(runs)
    plots = [
        curves.reward(runs),
        *curves.held_out_reward(runs),
        *(draw(runs) for draw in (curves.entropy, curves.gradient_norm)),
        *(draw(runs) for draw in (curves.k3, curves.f2, curves.disagreement)),
        *(draw(runs) for draw in (distributions.by_layer, distributions.differing_layers, distributions.margins)),
        *objective_plots(runs),
        curves.expert_load(runs),
    ]
    return {
        "title": f"Run {runs[0].label}" if len(runs) == 1 else f"Comparison of {len(runs)} runs",
        "runs": [
            {"run": run, "colour": colour_of(position), "facts": describe(run), "pace": pace(row)}
            for position, (run, row) in enumerate(zip(runs, rows, strict=True))
        ],
        "rows": rows,
        "colours": [colour_of(position) for position in range(len(runs))],
        "window": WINDOW,
        "notes": [*_reading_notes(runs), *_table_notes(rows)],
        "plots": plots,
        "alarm_rows": alarm_rows(runs),
        "watched": watched(runs),
        "load_rows": load_rows(runs),
        "load_plots": rank_load_plots(runs),
        "config": _config_lines(runs),
    }


def _reading_notes(runs: Sequence[Run]) -> list[str]:
    notes = [f"{run.label}: {note}" for run in runs for note in run.notes]
    for run in runs:
        failures = sum(step.reward_failures for step in run.steps)
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
        if not row.paired_steps and row.k3.native is None and row.k3.replayed is None:
            notes.append(f"{row.run}: the mismatch of trainer and rollout engine was not recorded.")
        elif not row.paired_steps:
            notes.append(
                f"{row.run}: at no step was the mismatch measured both without and with replay, "
                "so what it shows is the average over the steps that were measured one way."
            )
        if row.steps < 2 * WINDOW:
            notes.append(f"{row.run}: has {row.steps} steps, so its first and last {WINDOW} steps overlap.")
    return notes


def _config_lines(runs: Sequence[Run]) -> list[_ConfigLine]:
    """Every key of every configuration, those that differ between runs first."""
    flat = [flattened(run.config) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    lines = [_ConfigLine(key, tuple(values.get(key, "not set") for values in flat)) for key in keys]
    return sorted(lines, key=lambda line: not line.differs)

"""Run folders -> one self-contained HTML page: nothing in it is loaded from elsewhere, and nothing in it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreroute.errors import InputError
from foreroute.report.load_rows import load_rows
from foreroute.report.records import Run, read_runs
from foreroute.report.table import WINDOW, SummaryRow, summary_rows
from foreroute.report.wording import describe, pace, percentage, reward, scientific, seconds
from foreroute.trace import write_atomically


def write_report(run_folders: Sequence[Path], target: Path) -> Path:
    """Write the report of one run, or the comparison of several, to `target`; a report that is there is replaced.

    Raises:
        InputError: when no folder is given, `target` is a folder, or the `report` extra is not installed.
        RunFolderError: when a run folder is missing or damaged.
    """
    target = Path(target)
    if target.is_dir():
        raise InputError(f"{target} is a folder; name the file to write, for example {target / 'report.html'}")
    runs = read_runs(run_folders)
    html = _render(runs)
    write_atomically(target, lambda temporary: _write(temporary, html))
    return target


@dataclass(frozen=True)
class _ConfigLine:
    """One key of the configuration, with its value in each run."""

    key: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def _write(path: str | os.PathLike[str], html: str) -> None:
    Path(path).write_text(html, encoding="utf-8")


def _render(runs: Sequence[Run]) -> str:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        from foreroute.report import curves, distributions
        from foreroute.report.canvas import colour_of
        from foreroute.report.objective import objective_plots
        from foreroute.report.rank_load import rank_load_plots
    except ModuleNotFoundError as error:
        raise InputError(f"a report needs {error.name}; install it with: pip install 'foreroute[report]'") from error
    environment = Environment(
        loader=PackageLoader("foreroute.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    wording = {"percentage": percentage, "reward": reward, "scientific": scientific, "seconds": seconds}
    environment.filters.update(wording)
    environment.globals.update(wording)  # macros take them as arguments
    rows = summary_rows(runs)
    plots = [
        *(draw(runs) for draw in (curves.reward, curves.entropy, curves.gradient_norm)),
        *(draw(runs) for draw in (curves.k3, curves.f2, curves.disagreement)),
        *(draw(runs) for draw in (distributions.by_layer, distributions.differing_layers, distributions.margins)),
        *objective_plots(runs),
        curves.expert_load(runs),
    ]
    return environment.get_template("page.html.j2").render(
        title=f"Run {runs[0].label}" if len(runs) == 1 else f"Comparison of {len(runs)} runs",
        runs=[
            {"run": run, "colour": colour_of(position), "facts": describe(run), "pace": pace(row)}
            for position, (run, row) in enumerate(zip(runs, rows, strict=True))
        ],
        rows=rows,
        colours=[colour_of(position) for position in range(len(runs))],
        window=WINDOW,
        notes=[*_reading_notes(runs), *_table_notes(rows)],
        plots=plots,
        load_rows=load_rows(runs),
        load_plots=rank_load_plots(runs),
        config=_config_lines(runs),
    )


def _reading_notes(runs: Sequence[Run]) -> list[str]:
    return [f"{run.label}: {note}" for run in runs for note in run.notes]


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
    flat = [_flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    lines = [_ConfigLine(key, tuple(values.get(key, "not set") for values in flat)) for key in keys]
    return sorted(lines, key=lambda line: not line.differs)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = "none" if value is None else str(value)
    return flat

"""`foreroute simulate`: one RL step on a described cluster, under every method; a table, a page, and all figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from foreroute.errors import RunFolderError
from foreroute.report import SimulationRow, compared, simulation_rows, simulation_summary, write_simulation_page
from foreroute.simulate import (
    SimulateConfig,
    SimulationRecord,
    SweepRecord,
    Timeline,
    load_config,
    simulate,
    sweep,
    timeline,
)
from foreroute.simulate.config import SweepConfig
from foreroute.simulate.simulation import OnProgress
from foreroute.trace import write_atomically

TIMELINE_LAYERS = 5


def run_simulation(config_path: Path, output: Path | None) -> None:
    """Simulate, print the table, write the folder.

    Args:
        config_path: a TOML file, see `foreroute.simulate.config`.
        output: the folder, which must be empty or not there; runs/simulate/NAME by default.

    Raises:
        InputError: for everything that a user can mend.
    """
    folder = output or Path("runs") / "simulate" / config_path.stem
    _check_free(folder)
    config = load_config(config_path)
    console = Console()
    with _watching(console, "simulating") as on_progress:
        record = simulate(config, on_progress=on_progress)
    _print(record, console)
    with _watching(console, "timelines") as on_progress:
        timelines = _timelines(config, record, on_progress)
    sweeps = _sweeps(config, record, console)
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / "config.json", config.model_dump(mode="json"))
    figures = record.as_dict() | {
        "sweeps": [point.as_dict() for point in sweeps],
        "timelines": [found.as_dict() for found in timelines],
    }
    _save(folder / "simulation.json", figures)
    page = write_simulation_page(record, config, folder / "report.html", sweeps=sweeps, timelines=timelines)
    console.print(f"{'figures':<9} {folder / 'simulation.json'}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"{'page':<9} {page}", soft_wrap=True, highlight=False, markup=False)


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} is not empty; nothing was changed. Name another folder with --output")


def _timelines(config: SimulateConfig, record: SimulationRecord, on_progress: OnProgress) -> list[Timeline]:
    """Of static and the method that the page is about: layers in the middle of the first pipeline stage."""
    layers = config.described().costs.model.num_layers // config.cluster.pipeline
    first = max(0, (layers - TIMELINE_LAYERS) // 2)
    chosen = range(first, min(first + TIMELINE_LAYERS, layers))
    names = list(dict.fromkeys(["static", *(method.name for method in compared(record)[:1])]))
    micro_step = min(1, record.cells_per_group // config.described().costs.model.num_layers - 1)
    found = []
    for n, name in enumerate(names):
        on_progress(record[name].label, n, len(names))
        found.append(timeline(config, name, micro_step=micro_step, layers=chosen))
    return found


def _sweeps(config: SimulateConfig, record: SimulationRecord, console: Console) -> list[SweepRecord]:
    """Of static and the methods that plots compare with it; all methods would take many times as long."""
    names = ("static", *(method.name for method in compared(record)))
    narrowed = config.model_copy(update={"methods": names})
    total = sum(len(getattr(config.sweep, key)) for key in SweepConfig.model_fields)
    found: list[SweepRecord] = []
    with _watching(console, "sweeps") as on_progress:
        for point in sweep(narrowed):
            found.append(point)
            on_progress(f"{point.key} {point.value:g}", len(found), total)
    return found


@contextmanager
def _watching(console: Console, what: str) -> Iterator[OnProgress]:
    """A bar on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def on_progress(name: str, done: int, total: int) -> None:
            progress.update(task, description=f"{what}: {name}", completed=done, total=total)

        yield on_progress


def _print(record: SimulationRecord, console: Console) -> None:
    facts = Table.grid(padding=(0, 1, 0, 0))
    facts.add_column(min_width=9)
    for name, value in record.facts.items():
        facts.add_row(Text(name), Text(value))
    console.print(facts)
    console.print(_table(simulation_rows(record)))
    for sentence in simulation_summary(record):
        console.print(sentence, highlight=False, markup=False)


def _table(rows: Sequence[SimulationRow]) -> Table:
    title = "\nRecompute and update, all modelled but the time of planning"
    table = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("", max_width=26)
    for heading in (
        "time, s",
        "static\n/ this",
        "of the\nideal",
        "over\nmean",
        "ex-\nposed",
        "planned\nin",
        "GPU-h\nsaved",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        style = "bold" if row.ours else ""
        cells = (row.training, row.gain, row.of_ideal, row.imbalance, row.exposed, row.planning, row.saved)
        table.add_row(row.label, *cells, style=style)
    return table


def _save(path: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=1)
    write_atomically(path, lambda temporary: _write(temporary, text))


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")

"""`foreroute simulate`: one RL step on a described cluster, under every method; a table, a page, and all figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from foreroute.cli.terminal import Console, shown_facts, shown_table, shown_tiles, working, write_page
from foreroute.costs.cluster_file import cluster_toml
from foreroute.errors import InputError, RunFolderError
from foreroute.files.writing import check_writable, write_atomically, writing_named
from foreroute.report.simulation import (
    beside_ranking,
    executed,
    fit_summary,
    fit_table,
    simulation_finding,
    simulation_table,
    simulation_tiles,
    write_simulation_page,
)
from foreroute.simulate import load_config, simulate


def run_simulation(
    config_path: Path, output: Path | None, *, measurements: Path | None = None, rates: Sequence[str] = ()
) -> None:
    """Fit rates to measurements if there are some, simulate, print the table, and write the folder."""
    folder = output or Path("runs") / "simulate" / config_path.stem
    # minutes of simulation must not end at a folder that cannot take them
    _check_free(folder)
    if rates and measurements is None:
        raise InputError("--rate says what to fit, and nothing to fit to was given; add --fit MEASUREMENTS")
    config, console, fitted = load_config(config_path), Console(), None
    if measurements is not None:
        from foreroute.simulate.fit import DEFAULT_RATES, fit_config

        with working("fitting rates to measurements", console):
            config, fitted = fit_config(config, measurements, rates or DEFAULT_RATES)
        console.print(shown_table(fit_table(fitted)))
        console.print(fit_summary(fitted), highlight=False)
    with working("simulating", console) as work:
        record = simulate(config, on_progress=lambda name, done, total: work.advance(done, total, detail=name))
    console.print(shown_facts(record.facts))
    console.print(shown_table(simulation_table(record)))
    for sentence in (simulation_finding(record), beside_ranking(record), executed(record)):
        console.print(sentence, highlight=False, markup=False)
    console.print(shown_tiles(simulation_tiles(record)))
    figures = record.as_dict() | {"fit": None if fitted is None else fitted.as_dict()}
    # with both files the step can be simulated anew, by any later version
    contents = {"simulation.json": figures, "config.json": config.model_dump(mode="json")}
    texts = {name: json.dumps(values, indent=1, allow_nan=False) for name, values in contents.items()}
    with working("writing the figures", console), writing_named(folder, RunFolderError):
        for name, text in (texts | {"cluster.toml": cluster_toml(config.described())}).items():
            write_atomically(folder / name, text, overwrite=False)
    console.print(f"{'figures':<9} {folder / 'simulation.json'}", soft_wrap=True, highlight=False, markup=False)
    page = folder / "report.html"
    write_page(console, lambda: write_simulation_page(record, config, page, fit=fitted))


def _check_free(folder: Path) -> None:
    with writing_named(folder, RunFolderError):
        if folder.exists() and not folder.is_dir():
            raise RunFolderError(f"{folder} is no folder; nothing was changed. Name another one with --output")
        if folder.exists() and any(folder.iterdir()):
            raise RunFolderError(f"{folder} is not empty; nothing was changed. Name another folder with --output")
        check_writable(folder / "simulation.json")

"""`foreroute demo-ep`: the demo's task on expert-parallel ranks, with R3 and a plan for every micro-step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from foreroute.cli.alive import is_first_rank
from foreroute.cli.demo import demo_values
from foreroute.cli.progress import console_of_rank
from foreroute.cli.terminal import Console
from foreroute.cli.train import train_and_report
from foreroute.errors import ConfigError
from foreroute.report import LoadRow, load_rows, read_runs
from foreroute.train import parse_config
from foreroute.train.ranks import num_started


def run_demo_ep(folder: Path, *, steps: int) -> None:
    """Train once, on as many ranks as torchrun started, write the report, and print what the plans did."""
    values: dict[str, Any] = demo_values()
    values["name"] = "R3-expert-parallel"
    values["rl"] |= {"steps": steps, "micro_step_tokens": 512}  # several micro-steps, as a large run has
    values["measure"] = {"compare_every": 5}
    values["parallel"] = {"expert": _num_ranks()}
    train_and_report(parse_config(values, source="the demo's configuration"), folder)
    if is_first_rank() and (folder / "metrics.jsonl").exists():
        (row,) = load_rows(read_runs([folder]))
        _print(row, console_of_rank())


def _num_ranks() -> int:
    started = num_started()
    if started == 1:
        raise ConfigError(
            "demo-ep shows expert parallelism, and 1 process runs; start several: "
            "torchrun --nproc-per-node 4 -m foreroute.cli demo-ep --folder FOLDER, or make demo-ep"
        )
    return started


def _print(row: LoadRow, console: Console) -> None:
    table = Table(title="Load of the ranks, per step", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in row.cells.items():
        table.add_row(name, value)
    console.print(table)
    console.print(
        "The busiest rank's assignments over the mean, summed over cells: with every expert at its home, by the plan, "
        "and as executed. 1 is perfect balance.",
        highlight=False,
    )

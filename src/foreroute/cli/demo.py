"""`foreroute demo` and `foreroute demo-ep`: train a tiny model, and print what was measured.

The first trains without and with replay after one warm start; the second on expert-parallel ranks, with R3 and a plan
for every micro-step.
"""

from __future__ import annotations

import tomllib
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from foreroute.cli.terminal import Console, is_first_rank, shown_table, write_page
from foreroute.cli.train import console_of_rank, train_and_report, watching
from foreroute.errors import ConfigError
from foreroute.files.config_file import MOST_COUNTED
from foreroute.records import read_runs
from foreroute.report.run import run_finding, write_report
from foreroute.report.run_tables import load_table, summary_table
from foreroute.train import RunFolder, TrainConfig, parse_config, train
from foreroute.train.ranks import num_started


def run_demo(folder: Path | None, *, steps: int | None, vllm_python: Path | None) -> None:
    """Train twice, print the table, write the report."""
    console = Console()
    folder = folder or Path("runs") / "demo" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    str(folder).encode()  # refuses a name that is no UTF-8, which the second run's configuration would hold
    warm = folder / "none" / "checkpoints" / "step-000000.safetensors"
    configs = [_config("none", steps, vllm_python), _config("R3", steps, vllm_python, begins_at=warm)]
    for config in configs:  # before the first trains for minutes
        RunFolder(folder / config.name).require_new("Name another --folder")
    for config in configs:
        with watching(config, console) as watcher:
            train(config, folder / config.name, watcher=watcher)
        if watcher.should_stop():
            console.print(f"stopped; the runs so far are in {folder}", soft_wrap=True, highlight=False, markup=False)
            return
    runs = [folder / config.name for config in configs]
    found = read_runs(runs)
    console.print(shown_table(summary_table(found)))
    console.print(run_finding(found), highlight=False, markup=False)
    console.print(
        "The two rows of a run have the same rollouts and the same weights: the trainer's forward on its own routes, "
        "and on the rollout's. The run trains with one of the two; its reward (first → last 10 steps) stands there.",
        highlight=False,
    )
    write_page(console, lambda: write_report(found, folder / "report.html"), name=f"{'report':<7}")
    trace = folder / "R3" / "rollouts" / "step-000000.safetensors"
    console.print(f"trace   {trace}   (foreroute inspect shows it)", soft_wrap=True, highlight=False, markup=False)


def demo_values() -> dict[str, Any]:
    """Give the demo's configuration, as `parse_config` takes it."""
    return tomllib.loads((files("foreroute.cli") / "arithmetic.toml").read_text(encoding="utf-8"))


def _config(routing: str, steps: int | None, vllm_python: Path | None, *, begins_at: Path | None = None) -> TrainConfig:
    """Give the configuration of one of the two runs."""
    values = demo_values()
    values["name"] = routing
    values["rl"]["routing"] = routing
    # the second run begins with the first checkpoint of the first, which must stay
    values["checkpoint"] = {"keep": MOST_COUNTED}
    if vllm_python is not None:
        values["rollout"] |= {"engine": "vllm", "server": {"python": str(vllm_python)}}
        # vLLM's attention on the CPU has kernels for heads of 32 and more
        values["model"]["sizes"]["head_dim"] = 32
    if begins_at is not None:
        values["warm_start"] = {"checkpoint": str(begins_at)}
    if steps is not None:
        values["rl"]["steps"] = steps
    return parse_config(values, source="the demo's configuration")


def run_demo_ep(folder: Path, *, steps: int) -> None:
    """Train once, on as many ranks as torchrun started, write the report, and print what the plans did."""
    if (started := num_started()) == 1:
        raise ConfigError(
            "demo-ep shows expert parallelism, and 1 process runs; start several: "
            "torchrun --nproc-per-node 4 -m foreroute.cli demo-ep --folder FOLDER, or make demo-ep"
        )
    values = demo_values()
    values["name"] = "R3-expert-parallel"
    values["rl"] |= {"steps": steps, "micro_step_tokens": 512}  # several micro-steps, as a large run has
    values["measure"] = {"compare_every": 5}
    values["parallel"] = {"expert": started}
    train_and_report(parse_config(values, source="the demo's configuration"), folder)
    if is_first_rank() and (folder / "metrics.jsonl").exists():
        console = console_of_rank()
        console.print(shown_table(load_table(read_runs([folder]))))
        console.print(
            "The busiest rank's assignments over the mean, summed over cells: with every expert at its home, by the "
            "plan, and as executed. 1 is perfect balance.",
            highlight=False,
        )

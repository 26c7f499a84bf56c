"""`foreroute train`."""

from __future__ import annotations

from pathlib import Path

from foreroute.cli.alive import is_first_rank
from foreroute.cli.page import write_page
from foreroute.cli.progress import console_of_rank, watching
from foreroute.report import write_report
from foreroute.train import TrainConfig, load_config, train


def run_training(config_path: Path, folder: Path | None, *, resume: bool) -> None:
    """Train, write the report, and say where things are. Under torchrun, rank 0 does the last two."""
    config = load_config(config_path)
    train_and_report(config, folder or Path("runs") / config.name, resume=resume)


def train_and_report(config: TrainConfig, folder: Path, *, resume: bool = False) -> None:
    """Train a configuration in a folder, write the report, and say where things are."""
    console = console_of_rank()
    with watching(config, console) as watcher:
        run = train(config, folder, resume=resume, watcher=watcher)
    if not is_first_rank():
        return
    saved = run.last_checkpoint() or "none: stopped in the warm start, nothing was written"
    console.print(f"checkpoint  {saved}", soft_wrap=True, highlight=False, markup=False)
    if watcher.should_stop() and run.last_checkpoint() is not None:
        console.print("stopped     the same command with --resume goes on from there", highlight=False)
    if (folder / "model").exists():
        console.print(f"model       {folder / 'model'}", soft_wrap=True, highlight=False, markup=False)
    if (folder / "metrics.jsonl").exists():
        write_page(console, lambda: write_report([folder], folder / "report.html"), name=f"{'report':<11}")

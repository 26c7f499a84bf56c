"""`foreroute train`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from foreroute.cli.progress import watching
from foreroute.report import write_report
from foreroute.train import load_config, train


def run_training(config_path: Path, folder: Path | None, *, resume: bool) -> None:
    """Train, write the report, and say where things are."""
    console = Console()
    config = load_config(config_path)
    folder = folder or Path("runs") / config.name
    with watching(config, console) as watcher:
        run = train(config, folder, resume=resume, watcher=watcher)
    saved = run.last_checkpoint() or "none: stopped in the warm start, nothing was written"
    console.print(f"checkpoint  {saved}", soft_wrap=True, highlight=False, markup=False)
    if (folder / "metrics.jsonl").exists():
        console.print(
            f"report      {write_report([folder], folder / 'report.html')}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )

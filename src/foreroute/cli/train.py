"""`foreroute train`: a run with its progress on the terminal, its report, and a checkpoint when it is interrupted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from foreroute.cli.terminal import CommandProgress, Console, is_first_rank, working, write_page
from foreroute.mismatch import Alarm
from foreroute.records import read_runs
from foreroute.report import run_finding, write_report
from foreroute.train import TrainConfig, Watcher, load_config, train

LINES_EVERY = 20
"""Steps between two lines where there is no terminal to draw a bar on; of the warm start, five times as many."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what schedulers send before they kill, and what a terminal sends that is closed."""
NARROW = 110
"""Columns of a terminal below which the figures need the bar's room."""
PACE_OVER_S = 3600.0
"""The pace of a run is that of the last hour, since a step may take minutes."""


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
        console.print(f"{'finding':<11} {run_finding(read_runs([folder]))}", highlight=False, markup=False)
        write_page(console, lambda: write_report([folder], folder / "report.html"), name=f"{'report':<11}")


class PaceColumn(ProgressColumn):
    """A column with the time per step."""

    def render(self, task: Task) -> Text:
        """Show the pace of the steps that this process has seen end; nothing before the second."""
        return Text(_pace(1 / task.speed) if task.speed else "", style="progress.data.speed")


def console_of_rank() -> Console:
    """Give the terminal to rank 0; the other ranks are silent but for their errors."""
    return Console(quiet=not is_first_rank())


@contextmanager
def watching(config: TrainConfig, console: Console) -> Iterator[Watcher]:
    """Show progress and alarms, and turn the first Ctrl-C, SIGTERM or SIGHUP into an orderly stop."""
    with (
        working(f"{config.name}, preparing the run") as work,
        (display := Display(config, console, work)).progress,
        _signals(console) as received,
    ):
        told: list[int] = []

        def should_stop() -> bool:
            if received and not told:
                told.append(received[0])
                again = "press Ctrl-C" if received[0] == signal.SIGINT else f"send {signal.Signals(received[0]).name}"
                console.print(f"stopping; {again} again to stop at once")
            return bool(received)

        yield Watcher(display.warm_start, display.step, should_stop, display.phase)


class Display:
    """What a run shows: a bar on a terminal, lines elsewhere, and alarms on both."""

    def __init__(self, config: TrainConfig, console: Console, work: CommandProgress) -> None:
        self._name, self._num_steps, self._console = config.name, config.rl.steps, console
        self._work, self._warm_start = work, config.warm_start
        self.progress = Progress(
            *_columns(console.width),
            console=console,
            speed_estimate_period=PACE_OVER_S,
            disable=not console.is_terminal,
        )
        self._warm = self.progress.add_task(
            f"{self._name}: warm start", total=self._warm_start.max_steps, figures="", visible=False
        )
        self._steps = self.progress.add_task(f"{self._name}: GRPO", total=self._num_steps, figures="")
        self._first: tuple[int, float] | None = None
        self._alarms: set[str] = set()

    def warm_start(self, step: int, loss: float) -> None:
        """Show a supervised step."""
        figures = f"loss {loss:.2f}, until {self._warm_start.stop_at_loss:g}"
        self.progress.update(self._warm, visible=True, completed=step + 1, figures=figures)
        self._at("warm start", f"step {step} of {self._warm_start.max_steps} at most, {figures}")
        if step % (5 * LINES_EVERY) == 0:
            self._line(f"warm start, step {step}, loss {loss:.2f}")

    def phase(self, step: int, phase: str) -> None:
        """Note that a phase of a step begins."""
        self._at(f"step {step}", phase)

    def step(self, record: dict[str, Any]) -> None:
        """Show a finished step, and the alarms that were not on before it."""
        step, now = record["step"], monotonic()
        self._at(f"after step {step}", "saving what is due")
        self._first = self._first or (step, now)
        self.progress.update(self._warm, visible=False)
        self.progress.update(self._steps, completed=step + 1, figures=_figures(record))
        if step % LINES_EVERY == 0 or step + 1 == self._num_steps:
            self._line(f"step {step}, {_figures(record)}{self._time_left(step, now)}")
        alarms = {each["kind"]: Alarm(**each) for each in record["alarms"]}
        for kind in sorted(alarms.keys() - self._alarms):
            self._say(f"alarm at step {step}: {alarms[kind]}. {alarms[kind].advice}")
        self._alarms = set(alarms)

    def _at(self, what: str, detail: str) -> None:
        """Note what the heartbeat says while nothing is printed."""
        if self._work.what != (what := f"{self._name}, {what}"):
            self._work.begin(what)
        self._work.detail = detail

    def _say(self, text: str) -> None:
        self._console.print(f"{self._name}: {text}", highlight=False, markup=False, soft_wrap=True)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._say(text)

    def _time_left(self, step: int, now: float) -> str:
        """Say it in words, from the steps since the run began or was resumed."""
        first, begun = self._first or (step, now)
        if first == step:
            return ""
        each_s, to_go = (now - begun) / (step - first), self._num_steps - step - 1
        left = f", {timedelta(seconds=round(each_s * to_go))} left" if to_go else ""
        return f", {_pace(each_s)}{left}"


def _columns(width: int) -> list[ProgressColumn]:
    """Choose the columns of the bar. Where the terminal is narrow the figures are wrapped, and nothing else is cut."""
    wide = width >= NARROW
    return [
        TextColumn("{task.description}"),
        *([BarColumn(bar_width=20)] if wide else []),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[figures]}", table_column=Column()),
        PaceColumn(table_column=Column(no_wrap=True)),
        *([TimeElapsedColumn(table_column=Column(no_wrap=True))] if wide else []),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    ]


def _pace(seconds: float) -> str:
    return f"{seconds:.3g} s/step"


def _figures(record: dict[str, Any]) -> str:
    parts = [f"reward {record['reward_mean']:.2f}"]
    for name, label in (("native", "without replay"), ("replayed", "with")):
        if name in record["mismatch"]:
            parts.append(f"k3 {label} {record['mismatch'][name]['k3']:.1e}")
    if balance := record.get("execution", {}).get("max_over_mean"):
        parts.append(f"busiest rank {balance['at_home']:.2f} → {balance['executed']:.2f}")
    return ", ".join(parts)


@contextmanager
def _signals(console: Console) -> Iterator[list[int]]:
    """Collect the first signal; the second is left to whoever had them before. One that is ignored stays ignored.

    Prints nothing: a handler may run anywhere.
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            give_back()
            signal.raise_signal(number)
            return
        received.append(number)
        # the terminal is gone, and printing there would fail before the state is saved
        console.quiet = console.quiet or number == signal.SIGHUP

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in ENDING:
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None):
            before[number] = handler
            signal.signal(number, note)
    try:
        yield received
    finally:
        give_back()

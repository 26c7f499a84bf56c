"""`foreroute train`: a run with progress on the terminal, a report, and a checkpoint when it is interrupted."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foreroute.cli.exit_codes import noting_the_first_signal
from foreroute.cli.terminal import Console, Work, is_first_rank, working, write_page
from foreroute.records import StepRecord, read_runs
from foreroute.records.step_record import SIDES, AlarmName
from foreroute.report.run import run_finding, write_report
from foreroute.train import TrainConfig, train
from foreroute.train.run import Watcher

LINES_EVERY = 20
"""Steps between two lines where there is no terminal to draw a bar on; of the warm start, five times as many."""


def train_and_report(config: TrainConfig, folder: Path, *, resume: bool = False) -> None:
    """Train in a folder, write the report, and say where things are. Under torchrun, rank 0 does the last two."""
    # gathering experts, which have a mesh of two axes, takes two calls, and torch says so on every rank
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
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
        found = read_runs([folder])
        console.print(f"{'finding':<11} {run_finding(found)}", highlight=False, markup=False)
        write_page(console, lambda: write_report(found, folder / "report.html"), name=f"{'report':<11}")


def console_of_rank() -> Console:
    """Give the terminal to rank 0; the other ranks are silent but for their errors."""
    return Console(quiet=not is_first_rank())


@contextmanager
def watching(config: TrainConfig, console: Console) -> Iterator[Watcher]:
    """Show progress and alarms, and turn the first Ctrl-C, SIGTERM or SIGHUP into an orderly stop."""
    with working(f"{config.name}, preparing the run", console) as work, noting_the_first_signal(console) as received:
        announced: list[int] = []

        def should_stop() -> bool:
            # the handler prints nothing, as it may run in the middle of a print
            if received.noted and not announced:
                announced.append(received.noted)
                name = signal.Signals(received.noted).name
                how = "press Ctrl-C" if received.noted == signal.SIGINT else f"send {name}"
                console.print(f"stopping; {how} again to stop at once")
            return received.noted > 0

        display = Display(config, console, work)
        yield Watcher(display.warm_start, display.step, should_stop, display.phase)


class Display:
    """Output of a run: what is under way, lines where there is no terminal, and alarms on both."""

    def __init__(self, config: TrainConfig, console: Console, work: Work) -> None:
        self._config, self._console, self._work = config, console, work
        self._metrics = ""
        self._alarms: set[AlarmName] = set()

    def warm_start(self, step: int, loss: float) -> None:
        """Show a supervised step."""
        limits = self._config.warm_start
        self._begin("warm start", "steps at most")
        self._work.advance(step + 1, limits.max_steps, f"loss {loss:.2f}, until {limits.stop_at_loss:g}")
        if step % (5 * LINES_EVERY) == 0:
            self._line(f"warm start, step {step}, loss {loss:.2f}")

    def phase(self, step: int, phase: str) -> None:
        """Note that a phase of a step begins."""
        self._begin("GRPO", "steps")
        self._work.advance(step, self._config.rl.steps, ", ".join(filter(None, [phase, self._metrics])))

    def step(self, record: StepRecord) -> None:
        """Show a finished step, and the alarms that were not on before it."""
        step, num_steps = record.step, self._config.rl.steps
        self._metrics = _metrics(record)
        self.phase(step + 1, "saving what is due")
        if step % LINES_EVERY == 0 or step + 1 == num_steps:
            self._line(", ".join(filter(None, [f"step {step}", self._metrics, self._work.time_left()])))
        for alarm in sorted(record.alarms or [], key=lambda alarm: alarm.name):
            if alarm.name not in self._alarms:
                seen = f": {_suspected(record)}" if alarm.name == "sentinel" else "."
                self._say(f"alarm at step {step}: {alarm}{seen} {alarm.advice}")
        self._alarms = {alarm.name for alarm in record.alarms or []}

    def _begin(self, what: str, unit: str) -> None:
        """Begin a part of the run, unless it is under way: the pace is that of a part."""
        # a new part begins a new pace
        if self._work.what != (what := f"{self._config.name}, {what}"):
            self._work.begin(what, unit=unit)

    def _say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(f"{self._config.name}: {text}", highlight=False, markup=False, soft_wrap=True)

    def _line(self, text: str) -> None:
        """Print a line where no bar shows the same."""
        if not self._console.is_terminal:
            self._say(text)


def _suspected(record: StepRecord) -> str:
    """Say what the sentinel saw, in one line."""
    first, *others = record.suspicions or []
    of_rank = f"rank {first.rank}, " if record.execution is not None else ""
    return f"{of_rank}{first.sentence}{f', and {len(others)} more' if others else ''}. {first.advice}"


def _metrics(record: StepRecord) -> str:
    """Give the figures of a step that its line on the terminal has."""
    parts = [f"reward {record.reward_mean:.2f}"]
    for side, label in zip(SIDES, ("without replay", "with"), strict=True):
        if side in record.mismatch:
            parts.append(f"k3 {label} {record.mismatch[side].k3:.1e}")
    if record.execution is not None and (balance := record.execution.max_over_mean):
        parts.append(f"busiest rank {balance['at_home']:.2f} → {balance['executed']:.2f}")
    return ", ".join(parts)

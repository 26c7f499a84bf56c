"""Showing a run as it goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from foreroute.train import TrainConfig, Watcher

LINES_EVERY = 20


def is_first_rank() -> bool:
    """Whether this process speaks for the run: it is alone, or rank 0 of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def console_of_rank() -> Console:
    """The terminal, for rank 0; the others are silent but for their errors."""
    return Console(quiet=not is_first_rank())


@contextmanager
def watching(config: TrainConfig, console: Console) -> Iterator[Watcher]:
    """A watcher that shows progress and turns the first Ctrl-C into an orderly stop."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    warm = progress.add_task(f"{config.name}: warm start", total=None, figures="", visible=False)
    steps = progress.add_task(f"{config.name}: GRPO", total=config.rl.steps, figures="")

    def line(text: str) -> None:
        if not console.is_terminal:
            console.print(text, highlight=False, soft_wrap=True)

    def on_warm_start(step: int, loss: float) -> None:
        progress.update(warm, visible=True, completed=step + 1, figures=f"loss {loss:.2f}")
        if step % (5 * LINES_EVERY) == 0:
            line(f"{config.name}: warm start, step {step}, loss {loss:.2f}")

    def on_step(record: dict[str, Any]) -> None:
        progress.update(warm, visible=False)
        progress.update(steps, completed=record["step"] + 1, figures=_figures(record))
        if record["step"] % LINES_EVERY == 0 or record["step"] + 1 == config.rl.steps:
            line(f"{config.name}: step {record['step']}, {_figures(record)}")

    with progress, _interrupts() as received:

        def should_stop() -> bool:
            if len(received) == 1:
                console.print("stopping; press Ctrl-C again to stop at once")
                received.append(0)
            return bool(received)

        yield Watcher(on_warm_start, on_step, should_stop)


def _figures(record: dict[str, Any]) -> str:
    parts = [f"reward {record['reward_mean']:.2f}"]
    if "evaluation" in record:
        parts.append(f"held out {record['evaluation']['reward_mean']:.2f}")
    if record.get("reward_failures"):
        parts.append(f"{record['reward_failures']} without reward")
    for name, label in (("native", "without replay"), ("replayed", "with")):
        if name in record["mismatch"]:
            parts.append(f"k3 {label} {record['mismatch'][name]['k3']:.1e}")
    if balance := record.get("execution", {}).get("max_over_mean"):
        parts.append(f"busiest rank {balance['at_home']:.2f} → {balance['executed']:.2f}")
    return ", ".join(parts)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects the first Ctrl-C; the second one interrupts at once. Prints nothing: a handler may run anywhere."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)

"""Runs the cells that have no result yet, some at a time, each in a process, and appends what comes out."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.cells import TRAINER_VERSION, Cell
from experiments.models import base_values, start_path

Say = Callable[[str], None]
Work = Callable[[Cell, Path], dict[str, Any]]


class GridError(Exception):
    """The grid cannot be run, or some of its cells failed."""


def run_cells(
    cells: Sequence[Cell], results: Path, starts: Path, *, processes: int, say: Say = print, work: Work | None = None
) -> int:
    """Run those that have no result, in their order, and count them.

    What is finished is written at once and never run again; a runner that was killed goes on where it was. A cell that
    fails is named, and the others go on. `starts` is the folder of the checkpoints that runs start from; `work`, a
    function of a module, makes the line of a cell.

    Raises:
        GridError: when another runner writes to the same results, cells failed, or a process was killed.
    """
    with _alone(results):
        _drop_torn_line(results)
        done = finished(results)
        todo = [cell for cell in cells if not _counts(done.get(cell.name), cell)]
        say(f"{len(cells) - len(todo)} of {len(cells)} cells have a result, {len(todo)} to run")
        try:
            failed = _run(todo, results, starts, processes, say, work or run_cell) if todo else []
        except BrokenProcessPool as error:
            raise GridError("a process was killed (out of memory?); finished cells have results: run again") from error
    if failed:
        raise GridError(f"{len(failed)} cells failed: {', '.join(failed)}. The others have their results; run again")
    return len(todo)


def finished(results: Path) -> dict[str, dict[str, Any]]:
    """The last result of each cell by name. A last line that was cut off is no result."""
    if not results.exists():
        return {}
    lines = results.read_text(encoding="utf-8").split("\n")[:-1]
    return {line["cell"]: line for line in map(json.loads, lines)}


def current(cells: Sequence[Cell], results: Path) -> dict[str, dict[str, Any]]:
    """Return the results that belong to these cells as they are configured now."""
    done = finished(results)
    return {cell.name: done[cell.name] for cell in cells if _counts(done.get(cell.name), cell)}


def run_cell(cell: Cell, starts: Path) -> dict[str, Any]:
    """One cell, in this process: its line of the results."""
    from experiments.noise import run_noise  # torch is for the processes that run cells
    from experiments.routes import run_routes
    from experiments.served import run_served
    from experiments.starts import started
    from experiments.static import run_static
    from experiments.training import run_training

    base = base_values(cell.start)
    # routes have a start of their own, which is part of what they take
    checkpoint = starts if cell.experiment == "routes" else started(starts, cell.start, base, cell.seed)
    begun = time.process_time()
    measures = {"static": run_static, "noise": run_noise, "served": run_served, "train": run_training}
    figures = (measures | {"routes": run_routes})[cell.experiment](cell, base, checkpoint)
    return {
        "cell": cell.name,
        "digest": cell.digest(base),
        "trainer": TRAINER_VERSION,
        "arm": cell.arm,
        "seed": cell.seed,
        "settings": {"start": cell.start, "shifted": cell.shifted, **cell.settings},
        "figures": figures,
        "processor_s": round(time.process_time() - begun, 1),
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("foreroute", "torch", "transformers", "numpy")},
    }


def _counts(line: dict[str, Any] | None, cell: Cell) -> bool:
    """Say whether a line is the result of a cell.

    A line without a version of the trainer was written until 2026-11-29. What it took for defaults is not known any
    more, so its settings are all that it is held by; `results.md` says how many there are.
    """
    if line is None:
        return False
    digest = cell.digest if "trainer" in line else cell.settings_digest
    return bool(line["digest"] == digest(base_values(cell.start)))


def _run(todo: Sequence[Cell], results: Path, starts: Path, processes: int, say: Say, work: Work) -> list[str]:
    """The names of those that failed."""
    failed = []
    # torch's threads do not survive a fork
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_leave_with, initargs=(os.getpid(),)) as pool:
        waiting: list[Cell] = list(todo)
        running: dict[Future[dict[str, Any]], Cell] = {}
        while waiting or running:
            while waiting and len(running) < processes:
                cell = _next(waiting, list(running.values()), starts)
                running[pool.submit(work, cell, starts)] = cell
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise error
                if error is not None:
                    failed.append(cell.name)
                    say(f"{cell.name} failed: {type(error).__name__}: {error}")
                    continue
                _append(results, future.result())
                say(f"{cell.name} took {future.result()['processor_s']} s; {len(waiting)} wait")
    return failed


def _next(waiting: list[Cell], running: Sequence[Cell], starts: Path) -> Cell:
    """Take the first cell that need not wait for a start which a running cell is making, or else the first."""
    being_made = {(cell.start, cell.seed) for cell in running if not start_path(starts, cell.start, cell.seed).exists()}
    free = (place for place, cell in enumerate(waiting) if (cell.start, cell.seed) not in being_made)
    return waiting.pop(next(free, 0))


def _append(results: Path, line: dict[str, Any]) -> None:
    with open(results, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")
        file.flush()
        # a cell is hours of work: it is on disk before it counts as done
        os.fsync(file.fileno())


def _drop_torn_line(results: Path) -> None:
    if not results.exists():
        return
    whole = results.read_bytes().rpartition(b"\n")
    if whole[2]:
        os.truncate(results, len(whole[0]) + len(whole[1]))


@contextmanager
def _alone(results: Path) -> Iterator[None]:
    results.parent.mkdir(parents=True, exist_ok=True)
    with open(results.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise GridError(f"another runner writes to {results}; wait for it, or end it") from error
        yield


def _leave_with(parent: int) -> None:
    """A runner that is killed cannot tell its processes; they look after it themselves."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

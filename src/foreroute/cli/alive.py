"""A sign of life: while a command prints nothing, a line every few seconds says what it is doing.

The line goes to standard error, of every verb, so that what a verb prints stays what it was. A terminal on which a bar
moves needs none. What is quicker than a few seconds says nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from time import monotonic

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from foreroute.cli.terminal import Console
from foreroute.errors import printable

EVERY_S = 4.5
"""Of silence. Nobody is to wait for 5 s, and the thread may be late."""
JOIN_S = 1.0
"""The thread writes to a pipe that may be full. A command does not wait for whoever reads it."""


def is_first_rank() -> bool:
    """Whether this process speaks for the run: it is alone, or rank 0 of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


class Work:
    """What a command is doing, for people. Any thread may change it, and none waits for another.

    Attributes:
        what: its name.
        detail: what it is at; empty where nothing is known.
        done, total: how much of it; nothing is said of a total of 0.
        unit: of these, in the plural.
    """

    def __init__(self, what: str, *, total: int = 0, unit: str = "") -> None:
        self.what, self.detail = what, ""
        self.done, self.total, self.unit = 0, total, unit
        self._begun = monotonic()
        self._is_compiling: Callable[[], bool] = bool

    def begin(self, what: str) -> None:
        """Another piece of work, of which no second has gone by."""
        self.what, self.detail, self._begun = what, "", monotonic()

    def advance(self, done: int, total: int, detail: str = "") -> None:
        """So much of it is done."""
        self.done, self.total, self.detail = done, total, detail

    def watch_kernels(self) -> None:
        """Say when a kernel is compiled. It takes numba, which takes long to be imported."""
        from foreroute.kernels import is_compiling

        self._is_compiling = is_compiling

    def __str__(self) -> str:
        """One line without control characters: "planning: 1,234 of 9,216 cells, 12 s"."""
        facts = [self.detail] if self.detail else []
        if self.total:
            facts.append(f"{self.done:,} of {self.total:,} {self.unit}".rstrip())
        if self._is_compiling():
            facts.append("compiling, once on this machine")
        facts.append(f"{monotonic() - self._begun:,.0f} s")
        separator = ": " if len(facts) > 1 else ", "
        return printable(f"{self.what}{separator}{', '.join(facts)}").replace("\n", "\\n")

    def __rich__(self) -> Text | Table:
        """The same line on a terminal, and a bar where it is known how much there is."""
        if not self.total:
            return Text(str(self))
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(str(self)), ProgressBar(self.total, self.done, width=20))
        return row


_under_way = [Work("starting")]
"""What this process is doing, the innermost last. The first is for want of anything better."""


@contextmanager
def working(what: str, console: Console | None = None, *, total: int = 0, unit: str = "") -> Iterator[Work]:
    """Something that may last, by name.

    Args:
        what: its name, which may hold names of files.
        console: where it is shown if that is a terminal; None where something else is shown there already.
        total: how much there is to do, if that is known.
        unit: of `total`, in the plural.
    """
    work = Work(what, total=total, unit=unit)
    work.watch_kernels()
    _under_way[0].what = "working"
    _under_way.append(work)
    try:
        with nullcontext() if console is None or not console.is_terminal else console.status(work):
            yield work
    finally:
        _under_way.remove(work)


@contextmanager
def speaking() -> Iterator[None]:
    """Whenever nothing was printed for `EVERY_S` seconds, say what is under way. Only the first rank does."""
    if not is_first_rank():
        yield
        return
    _under_way[0].begin("starting")
    over = threading.Event()
    thread = threading.Thread(target=_speak, args=(over,), name="foreroute speaks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_S)


def _speak(over: threading.Event) -> None:
    said = monotonic()
    while not over.wait(max(0.0, said + EVERY_S - monotonic())):
        said = max(said, Console.printed_at)
        if monotonic() >= said + EVERY_S:
            _write(f"{_under_way[-1]}\n")
            said = monotonic()


def _write(line: str) -> None:
    """Past the stream and its lock: who waits for a reader holds nobody up, and a fork takes no lock along."""
    with suppress(OSError, ValueError, AttributeError):  # nobody reads: the command meets that when it prints itself
        os.write(sys.stderr.fileno(), line.encode(errors="backslashreplace"))

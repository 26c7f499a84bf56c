"""Output of every verb: a console that escapes what it prints, progress on a terminal, tables, and where a page is."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import rich.console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from foreroute.errors import how_to_install, printable

if TYPE_CHECKING:  # most verbs show no table of a page
    from foreroute.report.page import Table as PageTable
    from foreroute.report.page import Tile, Tone

FEWEST_COLUMNS, MOST_COLUMNS = 40, 1000
"""Bounds that COLUMNS of the environment is brought into."""
TONES: dict[Tone, str] = {"": "", "fine": "green", "note": "blue", "warning": "yellow", "problem": "bold red"}
"""Styles of the tones of a page."""
FOREVER_S = 1e9
"""The pace is that of the whole work: a step of training may take longer than the half minute that Rich looks back."""
DRAWN_WITH = ("jinja2", "matplotlib")
"""The libraries that a page needs, of the extra "report"."""


class Console(rich.console.Console):
    """Rich's console, with control characters and marks of direction escaped, which names from outside may hold."""

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as Rich does, with text made `printable`; what Rich itself sends to a terminal is left alone."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Exit silently; the reader closed the pipe."""
        raise SystemExit(2)


def prepare_streams() -> None:
    """Make printing safe, whatever the streams and the locale are.

    A closed stream would hand its number to the next file that is opened, which would then hold what is printed.
    """
    # daemons and cron start programs with closed streams
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Rich takes any number: of 0 columns it prints nothing, and of millions as many blanks
    for name, least in (("COLUMNS", FEWEST_COLUMNS), ("LINES", 1)):
        value = os.environ.get(name, "")
        if value.isascii() and value.isdecimal() and len(value) < 10:
            os.environ[name] = str(min(max(int(value), least), MOST_COLUMNS))
        else:
            os.environ.pop(name, None)


def is_first_rank() -> bool:
    """Say whether this process speaks for the run: it is alone, or rank 0 of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


class Work:
    """The work of a command, as a line of Rich's progress."""

    def __init__(self, progress: Progress, what: str, *, total: int = 0, unit: str = "") -> None:
        self._progress = progress
        self.begin(what, total=total, unit=unit)

    def begin(self, what: str, *, total: int = 0, unit: str = "") -> None:
        """Begin a piece of work, of which no second has gone by; `total` 0 where nobody knows how much it is."""
        # one line at a time: a second bar would look like work that goes on beside the first
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self.what, self._unit = what, unit
        self._task = self._progress.add_task(what, total=None)
        if total:
            self.advance(0, total)

    def advance(self, done: int, total: int, detail: str = "") -> None:
        """Note that so much of it is done, and what it is at."""
        facts = [*filter(None, [detail]), f"{done:,} of {total:,} {self._unit}".rstrip()]
        said = f"{self.what}: {', '.join(facts)}"
        self._progress.update(self._task, completed=done, total=total, description=said)

    def time_left(self) -> str:
        """Give the time that the rest takes at the pace so far; empty where that is not known."""
        seconds = self._progress.tasks[0].time_remaining
        return f"{timedelta(seconds=seconds)} left" if seconds else ""


@contextmanager
def working(what: str, console: Console, *, total: int = 0, unit: str = "") -> Iterator[Work]:
    """Show on a terminal what is done while the context is open; `unit` is a plural noun for `total`, as "cells"."""
    progress = Progress(
        TextColumn("{task.description}", markup=False, table_column=Column()),  # a narrow terminal wraps it
        BarColumn(20),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=FOREVER_S,
    )
    with progress:
        yield Work(progress, what, total=total, unit=unit)


def shown_table(table: PageTable) -> Table:
    """Show the columns of a table that are for a terminal, and all rows."""
    title = Text(f"\n{table.title}") if table.title else None
    shown = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left")
    # a terminal is narrower than a page
    numbers = [number for number, column in enumerate(table.columns) if column.short]
    for number in numbers:
        right = number > 0 and table.columns[number].content == "number"
        shown.add_column(table.columns[number].short, justify="right" if right else "left", no_wrap=right)
    for row in table.rows:
        first, *others = (Text(row.cells[number]) for number in numbers)
        first.stylize(TONES[row.tone])
        shown.add_row(first, *others, style="bold" if row.strong else "")
    return shown


def shown_facts(facts: Mapping[str, str]) -> Table:
    """Show names and what they are, below each other."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(min_width=9)
    for name, value in facts.items():
        table.add_row(Text(name), Text(value))
    return table


def shown_tiles(tiles: Iterable[Tile]) -> Table:
    """Show names and values, with what each is to be seen against."""
    return shown_facts({tile.name: f"{tile.value}{f' ({tile.against})' if tile.against else ''}" for tile in tiles})


def write_page(console: Console, write: Callable[[], Path], *, name: str = f"{'page':<9}") -> None:
    """Write a page and say where it is, or say what is missing for one: the light core has figures alone."""
    # asked before drawing: the figures are printed already, and a missing picture is no failure of the command
    missing = [library for library in DRAWN_WITH if find_spec(library) is None]
    with working("drawing the page", console):
        found = (
            f"skipped: {' and '.join(missing)} not installed; {how_to_install('report')}" if missing else str(write())
        )
    console.print(f"{name} {found}", soft_wrap=True, highlight=False, markup=False)

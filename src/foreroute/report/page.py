"""Parts of a page, and one self-contained HTML file of it: every page of foreroute is made here.

A page is a finding, tiles, facts, and sections of texts, plots, tables and notes. A table is declared once, for the
page and for a terminal. A number stands in one place, the finding aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from foreroute.errors import InputError, how_to_install, printable
from foreroute.files.regular import as_path, open_regular
from foreroute.files.writing import check_writable, write_atomically, writing_named
from foreroute.report.format import STYLE

MARK = '<meta name="generator" content="foreroute">'
"""In the head of every page. A file with it may be replaced by another page, any other file may not."""
MARKED_WITHIN = 1024
"""Bytes of a page that are searched for the mark."""

Tone = Literal["", "fine", "note", "warning", "problem"]
"""Colour of how good or bad something is; nothing is said by an empty one."""


@dataclass(frozen=True)
class Tile:
    """One number of weight that no table holds: its name, its value, and what that is to be seen against."""

    name: str
    value: str
    against: str = ""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    heading: str  # of the page
    short: str = ""  # of a terminal, with line breaks; a column without one is on the page alone
    # numbers stand on the right and are not broken, words on the left; code is for a shell
    content: Literal["number", "words", "code"] = "number"


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row of a table."""

    cells: tuple[str, ...]  # text, one for each column; an empty one says nothing
    strong: bool = False  # whether it is what the page is about
    colour: str = ""  # of the run that it is about, as on the plots
    tone: Tone = ""  # how bad it is


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings."""

    columns: tuple[Column, ...]  # of every row
    rows: tuple[TableRow, ...]  # from the top
    title: str = ""  # for a terminal, and for a section of several tables
    folded: str = ""  # what stands in its place until a reader opens it; empty where all is seen

    def __post_init__(self) -> None:
        """A row has a cell for every column."""
        if wrong := [row.cells for row in self.rows if len(row.cells) != len(self.columns)]:
            raise ValueError(f"a row has {len(wrong[0])} cells, {wrong[0]}; the table has {len(self.columns)} columns")

    def column(self, heading: str) -> list[str]:
        """The cells below a heading, from the top."""
        index = [column.heading for column in self.columns].index(heading)
        return [row.cells[index] for row in self.rows]


@dataclass(frozen=True, kw_only=True)
class Caption:
    """The words of a plot. `absent` says why there is none when no run recorded its data."""

    title: str
    sentence: str
    x_label: str = "training step"
    y_label: str
    absent: str = "This was not recorded."


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a colour, or a run's dashes when `colour` is None; with both, a run that has the two."""

    label: str
    colour: str | None
    dashes: str = ""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One card of the page: a picture as a data URI, or None with the reason in `caption.absent`."""

    caption: Caption
    image: str | None = None
    alt: str = ""
    keys: tuple[Key, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A part of a page, in the order of its attributes; `keys` are the legend of all its plots."""

    heading: str
    texts: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole page."""

    command: str  # that makes it
    title: str  # what it is about
    finding: str  # what the numbers say, in one sentence
    tone: Tone = ""  # of the finding
    tiles: tuple[Tile, ...] = ()  # numbers of weight
    facts: Mapping[str, str] = field(default_factory=dict)  # what was looked at and how, by name
    sections: tuple[PageSection, ...] = ()  # from the top


def check_page(target: Path) -> None:
    """Refuse a target that no page can be written to, before the work for that page begins.

    Raises:
        InputError: when `target` is a folder or no regular file, cannot be written, or is a file that is neither empty
            nor a page that foreroute wrote.
    """
    target = as_path(target, InputError)
    with writing_named(target, InputError):
        if target.is_dir():
            raise InputError(f"{target} is a folder; name the file to write, for example {target / 'report.html'}")
        check_writable(target)
        # a new file replaces nothing
        if not target.exists():
            return
    # a user's own file is never overwritten by a page
    with open_regular(target, InputError) as file:
        head = file.read(MARKED_WITHIN)
    if head and MARK.encode() not in head:
        raise InputError(
            f"{target} exists and is no page that foreroute wrote; nothing was changed. Choose another path"
        )


def write_page(target: Path, make: Callable[[], Page]) -> Path:
    """Make a page, in the style of all plots, and write it; a page that is there is replaced.

    Raises:
        InputError: as `check_page` does, when the system refuses to write, and when the `report` extra is not
            installed.
    """
    target = as_path(target, InputError)
    check_page(target)
    try:
        import matplotlib
        from jinja2 import Environment, PackageLoader, StrictUndefined

        # made here, since a plot takes the style of the moment in which it is made
        with matplotlib.rc_context(STYLE):
            page = make()
    except ModuleNotFoundError as error:
        raise InputError(f"a page needs {error.name}, which is not installed; {how_to_install('report')}") from error
    # names of runs and models come from outside: all of them are escaped
    environment = Environment(
        loader=PackageLoader("foreroute.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = printable(environment.get_template("page.html.j2").render(page=page, mark=MARK))
    assert MARK in html[:MARKED_WITHIN], "the page could not be told from a file that is not ours"
    with writing_named(target, InputError):
        write_atomically(target, html)
    return target

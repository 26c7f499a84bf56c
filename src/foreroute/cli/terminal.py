"""The door to the terminal: what is printed is shown, and never obeyed."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, ClassVar

import rich.console
from rich.segment import Segment

from foreroute.errors import printable

FEWEST_COLUMNS, MOST_COLUMNS = 40, 1000


class Console(rich.console.Console):
    """Rich's console, which every verb prints with. Control characters and marks of direction are escaped.

    Names of files and models, and whatever else comes from outside, may hold such characters. What Rich itself sends
    to a terminal, colours and the moves of a progress bar, is left alone.

    Attributes:
        printed_at: when any console of this process last printed, by `time.monotonic`.
    """

    printed_at: ClassVar[float] = 0.0

    def print(self, *objects: Any, **options: Any) -> None:
        """As Rich does."""
        super().print(*objects, **options)
        Console.printed_at = monotonic()

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As Rich does, `printable`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """End without a word: nobody reads on."""
        raise SystemExit(2)


class _Output(io.TextIOWrapper):
    """Standard output, whose errors say that it is this stream, and not a file, that cannot be written."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            stream.encoding,
            stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._stream = stream  # which would close the buffer if it were let go

    def write(self, text: str) -> int:
        with _named():
            return super().write(text)

    def flush(self) -> None:
        with _named():
            super().flush()


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = "standard output"
        raise


def prepare_streams() -> None:
    """Make printing safe, whatever the streams, the locale and the width of the terminal are.

    A closed stream would hand its number to the next file that is opened, which would then hold what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout = _Output(sys.stdout)
    for name, least, most in (("COLUMNS", FEWEST_COLUMNS, MOST_COLUMNS), ("LINES", 1, MOST_COLUMNS)):
        if (value := os.environ.get(name)) is None:
            continue
        if value.isascii() and value.isdecimal() and len(value) < 10:
            os.environ[name] = str(min(max(int(value), least), most))
        else:
            del os.environ[name]

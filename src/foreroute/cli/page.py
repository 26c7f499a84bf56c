"""The page that a command writes beside its figures, where the libraries that draw it are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from foreroute.cli.alive import working
from foreroute.cli.terminal import Console
from foreroute.errors import how_to_install

DRAWN_WITH = ("jinja2", "matplotlib")


def write_page(console: Console, write: Callable[[], Path], *, name: str = f"{'page':<9}") -> None:
    """Write a page and say where it is, or say what is missing for one: the light core has figures alone."""
    missing = [library for library in DRAWN_WITH if find_spec(library) is None]
    with working("drawing the page", console):
        found = f"none, for want of {' and '.join(missing)}; {how_to_install('report')}" if missing else str(write())
    console.print(f"{name} {found}", soft_wrap=True, highlight=False, markup=False)

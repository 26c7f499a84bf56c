"""A template and what it shows -> one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foreroute.errors import InputError, how_to_install, printable
from foreroute.files import check_writable, open_regular, write_atomically, writing_named

MARK = '<meta name="generator" content="foreroute">'
"""In the head of every page. A file with it may be replaced by another page, any other file may not."""
MARKED_WITHIN = 1024
"""Bytes of a page that are searched for the mark."""


def check_page(target: Path) -> None:
    """Refuse a target that no page can be written to, before the work for that page begins.

    Raises:
        InputError: when `target` is a folder or no regular file, cannot be written, or is a file that is neither empty
            nor a page that foreroute wrote.
    """
    target = Path(target)
    with writing_named(target, InputError):
        if target.is_dir():
            raise InputError(f"{target} is a folder; name the file to write, for example {target / 'report.html'}")
        check_writable(target)
        if not target.exists():
            return
    with open_regular(target, InputError) as file:
        head = file.read(MARKED_WITHIN)
    if head and MARK.encode() not in head:
        raise InputError(
            f"{target} exists and is no page that foreroute wrote; nothing was changed. Choose another path"
        )


def write_html(
    target: Path,
    template: str,
    values: Callable[[], Mapping[str, Any]],
    wording: Mapping[str, Callable[..., str]] | None = None,
) -> Path:
    """Fill a template and write the file; a page that is there is replaced.

    Args:
        target: the file to write.
        template: its name in this room.
        values: makes what the template shows, and may import what the `report` extra brings.
        wording: functions by name, for use as filters and in macros.

    Raises:
        InputError: as `check_page` does, when the system refuses to write, and when the `report` extra is not
            installed.
    """
    target = Path(target)
    check_page(target)
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        from foreroute.report.figure import in_style

        with in_style():
            shown = values()
    except ModuleNotFoundError as error:
        raise InputError(f"a page needs {error.name}, which is not installed; {how_to_install('report')}") from error
    environment = Environment(
        loader=PackageLoader("foreroute.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(wording or {})
    environment.globals.update(wording or {})  # macros take them as arguments
    html = printable(environment.get_template(template).render(shown))
    assert MARK in html[:MARKED_WITHIN], f"{template} could not be told from a file that is not ours"
    with writing_named(target, InputError):
        write_atomically(target, html)
    return target

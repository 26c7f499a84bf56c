"""A template and what it shows -> one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foreroute.errors import InputError
from foreroute.files import write_atomically


def write_html(
    target: Path,
    template: str,
    values: Callable[[], Mapping[str, Any]],
    wording: Mapping[str, Callable[..., str]] | None = None,
) -> Path:
    """Fill a template and write the file; one that is there is replaced.

    Args:
        target: the file to write.
        template: its name in this room.
        values: makes what the template shows, and may import what the `report` extra brings.
        wording: functions by name, for use as filters and in macros.

    Raises:
        InputError: when `target` is a folder, or the `report` extra is not installed.
    """
    target = Path(target)
    if target.is_dir():
        raise InputError(f"{target} is a folder; name the file to write, for example {target / 'report.html'}")
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        shown = values()
    except ModuleNotFoundError as error:
        raise InputError(f"a report needs {error.name}; install it with: pip install 'foreroute[report]'") from error
    environment = Environment(
        loader=PackageLoader("foreroute.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(wording or {})
    environment.globals.update(wording or {})  # macros take them as arguments
    html = environment.get_template(template).render(shown)
    write_atomically(target, html)
    return target

"""The tables of the pages, as rows of text: what `tables.toml` asks for, from the figures of arms."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from experiments.arms import Arms, metric
from experiments.wording import interval_text, number, percent

Table = list[list[str]]
SHOWN = {
    "number": lambda found: number(found.mean),
    "percent": lambda found: percent(found.mean),
    "interval": interval_text,
}
"""How the mean of a figure over seeds is shown."""


@cache
def layouts() -> dict[str, dict[str, Any]]:
    """All tables by name: `columns`, `cells`, `each`, and on some a `heading` and a `text`."""
    return tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))


def table(name: str, arms: Arms) -> Table:
    """The rows for which there is any result."""
    layout = layouts()[name]
    rows = []
    for taken in zip(*layout["each"].values(), strict=True):
        values = dict(zip(layout["each"], taken, strict=True))
        cells = [_filled(cell, values) for cell in layout["cells"]]
        if any(arm in arms for cell in cells for text in cell for arm in _parts(text)[1]):
            rows.append(["; ".join(_shown(text, arms) for text in cell) for cell in cells])
    return rows


def _filled(cell: str | list[str], values: dict[str, str]) -> list[str]:
    return [text.format(**values) for text in ([cell] if isinstance(cell, str) else cell)]


def _parts(text: str) -> tuple[str, list[str], str]:
    """How a cell is shown, its arms and its figure; text has no arms."""
    how, *rest = text.split(" | ")
    return how, rest[0].split(";") if rest else [], rest[1] if len(rest) > 1 else ""


def _shown(text: str, arms: Arms) -> str:
    how, of, name = _parts(text)
    if not of:
        return text
    if how == "collapsed":
        collapsed, runs = (sum(counts) for counts in zip(*map(arms.collapsed, of), strict=True))
        return f"{collapsed}/{runs}" if runs else "-"
    if how == "difference":
        return interval_text(arms.difference(of[0], of[1], metric(name)), signed=True)
    return SHOWN[how](arms.mean(of[0], metric(name)))

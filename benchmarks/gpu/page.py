"""The page of one run."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any


def write_page(report: Mapping[str, Any], shows: Mapping[str, str], path: Path) -> None:
    """Parts, their checks and their figures."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(shows[name])}</td><td>{escape(outcome)}</td></tr>"
        for name, outcome in report["parts"].items()
    )
    path.write_text(f"<!doctype html><meta charset=utf-8><table>{rows}</table>", encoding="utf-8")

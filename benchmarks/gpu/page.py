"""The page of one run: what passed, then every figure beside its aim, then every check."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430 }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
p { margin: .2rem 0 1rem } .env { color: #5b6676 }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .25rem .8rem .25rem 0;
vertical-align: top; border-bottom: 1px solid #e3e7ec } th { font-weight: 600; color: #5b6676 }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap }
td.why { overflow-wrap: anywhere }
.passed { color: #17703c } .failed { color: #b3261e; font-weight: 600 } .skipped { color: #7a5b00 }
summary { cursor: pointer; color: #5b6676 }
"""
AIM = "_aim"
QUARTILES = "_quartiles"


def write_page(report: Mapping[str, Any], shows: Mapping[str, str], path: Path) -> None:
    """Write it.

    Args:
        report: what `run` returns.
        shows: what each part is about.
        path: of the page, which is replaced.
    """
    outcomes = report["parts"]
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(shows[name])}</td>{_outcome(outcome)}"
        f"<td class=number>{report['seconds'][name]:g} s</td></tr>"
        for name, outcome in outcomes.items()
    )
    environment = ", ".join(f"{name} {value}" for name, value in report["env"].items())
    parts = "".join(_part(name, report) for name in outcomes)
    new = path.with_suffix(".new")
    new.write_text(
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f"<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>foreroute on {escape(report['device_name'])}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(finding(report))}</h1><p class=env>{escape(environment)}</p>"
        f"<table><tr><th>part</th><th>shows</th><th>outcome</th><th>took</th></tr>{rows}</table>{parts}</body></html>\n",
        encoding="utf-8",
    )
    new.replace(path)


def finding(report: Mapping[str, Any]) -> str:
    """One sentence: how many parts passed, and on what."""
    kinds = [_kind(outcome) for outcome in report["parts"].values()]
    passed, failed, skipped = (kinds.count(kind) for kind in ("passed", "failed", "skipped"))
    others = [f"{number} {kind}" for number, kind in ((failed, "failed"), (skipped, "skipped")) if number]
    text = f"{passed} of {len(kinds)} parts passed on {report['device_name']}"
    text += f" ({', '.join(others)})" if others else ""
    return text if report["full"] else f"{text}, at small sizes: the figures below say nothing of a GPU"


def reached(value: float, aim: str) -> bool:
    """Whether a figure meets an aim such as "<= 1.005" or ">= 0.9"."""
    sign, limit = aim.split()
    return value <= float(limit) if sign == "<=" else value >= float(limit)


def _part(name: str, report: Mapping[str, Any]) -> str:
    figures, checks = report["metrics"][name], report["checks"][name]
    rows = ""
    for figure, value in figures.items():
        if figure.endswith((AIM, QUARTILES)):
            continue
        aim = figures.get(f"{figure}{AIM}")
        spread = figures.get(f"{figure}{QUARTILES}")
        shown = f"{_number(value)} ({_number(spread[0])} to {_number(spread[1])})" if spread else _number(value)
        rows += f"<tr><td>{escape(figure)}</td><td class=number>{escape(shown)}</td>{_aim(value, aim, report)}</tr>"
    text = f"<h2>{escape(name)}</h2>"
    if rows:
        text += f"<table><tr><th>figure</th><th>median (quartiles)</th><th>aim</th></tr>{rows}</table>"
    kinds = [_kind(outcome) for outcome in checks.values()]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    lines = "".join(f"<tr><td>{escape(check)}</td>{_outcome(outcome)}</tr>" for check, outcome in checks.items())
    opened = " open" if "failed" in kinds else ""
    return text + f"<details{opened}><summary>checks: {counted or 'none'}</summary><table>{lines}</table></details>"


def _aim(value: Any, aim: str | None, report: Mapping[str, Any]) -> str:
    if aim is None:
        return "<td></td>"
    if not report["full"]:
        return f"<td>{escape(aim)}</td>"
    kind, word = ("passed", "reached") if reached(value, aim) else ("failed", "not reached")
    return f"<td>{escape(aim)}, <span class={kind}>{word}</span></td>"


def _outcome(outcome: str) -> str:
    return f"<td class='why {_kind(outcome)}'>{escape(outcome)}</td>"


def _kind(outcome: str) -> str:
    return outcome.partition(":")[0]


def _number(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_number(each) for each in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)

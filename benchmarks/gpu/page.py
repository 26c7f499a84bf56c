"""The page of one run: what passed, then the figures that have an aim, then all figures and checks."""

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
td.text, td.why { overflow-wrap: anywhere }
td:last-child, th:last-child { padding-right: 0 } details table { margin-bottom: 1rem }
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
        f"<table><tr><th>part</th><th>shows</th><th>outcome</th><th>took</th></tr>{rows}</table>{_aims(report)}{parts}"
        "</body></html>\n",
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


def _aims(report: Mapping[str, Any]) -> str:
    """Every figure that has one, whether it was reached where that can be said."""
    rows = ""
    for name, figures in report["metrics"].items():
        for figure in figures:
            if aim := figures.get(f"{figure}{AIM}"):
                rows += f"<tr><td>{escape(name)}</td><td>{escape(figure)}</td>{_value(figures, figure)}"
                rows += f"<td class=number>{escape(aim)}</td>{_judged(figures[figure], aim, report)}</tr>"
    heads = "".join(f"<th>{head}</th>" for head in ("part", "figure", "median (quartiles)", "aim", ""))
    return f"<h2>Aims</h2><table><tr>{heads}</tr>{rows}</table>" if rows else ""


def _part(name: str, report: Mapping[str, Any]) -> str:
    figures, checks = report["metrics"][name], report["checks"][name]
    shown = [figure for figure in figures if not figure.endswith((AIM, QUARTILES))]
    rows = "".join(f"<tr><td>{escape(figure)}</td>{_value(figures, figure)}</tr>" for figure in shown)
    worst_first = sorted(checks.items(), key=lambda each: ("failed", "skipped", "passed").index(_kind(each[1])))
    lines = "".join(f"<tr><td class=text>{escape(check)}</td>{_outcome(why)}</tr>" for check, why in worst_first)
    kinds = [_kind(outcome) for outcome in checks.values()]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    opened = " open" if "failed" in kinds else ""
    text = f"<h2>{escape(name)}</h2><details{opened}><summary>checks: {counted or 'none'}</summary>"
    text += f"<table>{lines}</table></details>"
    return text + f"<details><summary>figures: {len(shown)}</summary><table>{rows}</table></details>"


def _judged(value: Any, aim: str, report: Mapping[str, Any]) -> str:
    if not report["full"]:
        return "<td>not judged</td>"
    kind, word = ("passed", "reached") if reached(value, aim) else ("failed", "not reached")
    return f"<td class={kind}>{word}</td>"


def _value(figures: Mapping[str, Any], figure: str) -> str:
    value, spread = figures[figure], figures.get(f"{figure}{QUARTILES}")
    if spread:
        return f"<td class=number>{_number(value)} ({_number(spread[0])} to {_number(spread[1])})</td>"
    kind = "number" if isinstance(value, int | float) else "text"
    return f"<td class={kind}>{escape(_number(value))}</td>"


def _outcome(outcome: str) -> str:
    return f"<td class='why {_kind(outcome)}'>{escape(outcome)}</td>"


def _kind(outcome: str) -> str:
    return outcome.partition(":")[0]


def _number(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_number(each) for each in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""The page of one run: what passed, then the figures that have an aim, then all figures and checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreroute.report.page import Column, Page, PageSection, Table, TableRow, Tone

AIM = "_aim"
QUARTILES = "_quartiles"
TONES: dict[str, Tone] = {"passed": "fine", "failed": "problem", "skipped": "warning"}
OUTCOME = Column("outcome", kind="words")


def page_of(report: Mapping[str, Any], shows: Mapping[str, str]) -> Page:
    """The page of what `run` returns; `shows` is what each part is about."""
    parts = [
        TableRow(cells=(name, shows[name], outcome, f"{report['seconds'][name]:g} s"), tone=TONES[_kind(outcome)])
        for name, outcome in report["parts"].items()
    ]
    columns = (Column("part"), Column("shows", kind="words"), OUTCOME, Column("took"))
    aims = _aims(report)
    return Page(
        command="make gpu",
        title=f"foreroute on {report['device_name']}",
        finding=finding(report),
        facts=report["env"],
        sections=(
            PageSection(heading="Parts", tables=(Table(columns=columns, rows=tuple(parts)),)),
            *([PageSection(heading="Aims", tables=(aims,))] if aims.rows else []),
            *(_part(name, report) for name in report["parts"]),
        ),
    )


def finding(report: Mapping[str, Any]) -> str:
    """One sentence: how many parts passed, on what, and how many aims were reached."""
    kinds = [_kind(outcome) for outcome in report["parts"].values()]
    passed, failed, skipped = (kinds.count(kind) for kind in ("passed", "failed", "skipped"))
    others = [f"{number} {kind}" for number, kind in ((failed, "failed"), (skipped, "skipped")) if number]
    text = f"{passed} of {len(kinds)} parts passed on {report['device_name']}"
    text += f" ({', '.join(others)})" if others else ""
    if not report["full"]:
        return f"{text}, at small sizes: the figures below say nothing of a GPU"
    judged = [row.cells[-1] for row in _aims(report).rows]
    return f"{text}; {judged.count('reached')} of {len(judged)} aims were reached" if judged else text


def reached(value: float, aim: str) -> bool:
    """Whether a figure meets an aim such as "<= 1.005" or ">= 0.9"."""
    sign, limit = aim.split()
    return value <= float(limit) if sign == "<=" else value >= float(limit)


def _aims(report: Mapping[str, Any]) -> Table:
    """Every figure that has one, and whether it was reached where that can be said."""
    rows = []
    for name, figures in report["metrics"].items():
        for figure in figures:
            if aim := figures.get(f"{figure}{AIM}"):
                judged = reached(figures[figure], aim) if report["full"] else None
                words = {None: "not judged", True: "reached", False: "not reached"}[judged]
                tone: Tone = "" if judged is None else "fine" if judged else "problem"
                rows.append(TableRow(cells=(name, figure, _value(figures, figure), aim, words), tone=tone))
    columns = (Column("part"), Column("figure", kind="words"), Column("median (quartiles)"), Column("aim"), Column(""))
    return Table(columns=columns, rows=tuple(rows))


def _part(name: str, report: Mapping[str, Any]) -> PageSection:
    """Its checks, the worst first, and its figures."""
    figures, checks = report["metrics"][name], report["checks"][name]
    shown = [figure for figure in figures if not figure.endswith((AIM, QUARTILES))]
    worst_first = sorted(checks.items(), key=lambda each: ("failed", "skipped", "passed").index(_kind(each[1])))
    lines = tuple(TableRow(cells=(check, why), tone=TONES[_kind(why)]) for check, why in worst_first)
    kinds = [_kind(outcome) for outcome in checks.values()]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none"
    values = tuple(TableRow(cells=(figure, _value(figures, figure))) for figure in shown)
    tables = (
        Table(columns=(Column("check"), OUTCOME), rows=lines, folded=f"checks: {counted}"),
        Table(columns=(Column("figure"), Column("value")), rows=values, folded=f"figures: {len(shown)}"),
    )
    return PageSection(heading=name, tables=tuple(table for table in tables if table.rows))


def _value(figures: Mapping[str, Any], figure: str) -> str:
    value, spread = figures[figure], figures.get(f"{figure}{QUARTILES}")
    return f"{_number(value)} ({_number(spread[0])} to {_number(spread[1])})" if spread else _number(value)


def _kind(outcome: str) -> str:
    return outcome.partition(":")[0]


def _number(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_number(each) for each in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)

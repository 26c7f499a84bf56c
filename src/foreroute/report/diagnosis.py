"""A diagnosis -> one self-contained HTML page, or a table of measures for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foreroute.conformance.diagnosis import Diagnosis, Measures, Severity
from foreroute.errors import InputError
from foreroute.mismatch import RoutingMismatch, TokenMismatch
from foreroute.report.wording import percentage, scientific
from foreroute.trace import write_atomically

WORDS = {Severity.FINE: "fine", Severity.NOTE: "note", Severity.WARNING: "warning", Severity.PROBLEM: "problem"}


@dataclass(frozen=True)
class MeasureRow:
    """One comparison, as a row of a table. Cells are text; a dash means never measured."""

    name: str
    k3: str
    f2: str
    cells: str
    tokens: str


def measure_rows(measures: Measures) -> list[MeasureRow]:
    """What was measured, one row per comparison."""
    rows = [
        _row("Engine and trainer, without replay", measures.without, measures.routes),
        _row("Engine and trainer, with replay", measures.with_replay, None, replayed=True),
        _row("Trainer and itself, same batches", measures.repeated, None),
        _row("Trainer and itself, packed differently", measures.repacked, measures.repacked_routes),
    ]
    return [row for row in rows if row is not None]


def write_diagnosis(diagnosis: Diagnosis, target: Path) -> Path:
    """Write the page; one that is there is replaced.

    Raises:
        InputError: when `target` is a folder, or the `report` extra is not installed.
    """
    target = Path(target)
    if target.is_dir():
        raise InputError(f"{target} is a folder; name the file to write, for example {target / 'diagnosis.html'}")
    html = _render(diagnosis)
    write_atomically(target, lambda temporary: _write(temporary, html))
    return target


def _write(path: str, html: str) -> None:
    Path(path).write_text(html, encoding="utf-8")


def _render(diagnosis: Diagnosis) -> str:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        from foreroute.report.diagnosis_plots import diagnosis_plots
    except ModuleNotFoundError as error:
        raise InputError(f"a report needs {error.name}; install it with: pip install 'foreroute[report]'") from error
    environment = Environment(
        loader=PackageLoader("foreroute.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    findings = sorted(diagnosis.findings, key=lambda finding: -finding.severity)
    return environment.get_template("diagnosis.html.j2").render(
        headline=diagnosis.headline,
        worst=WORDS[diagnosis.worst],
        facts=diagnosis.facts,
        findings=[(WORDS[finding.severity], finding) for finding in findings],
        rows=measure_rows(diagnosis.measures),
        plots=diagnosis_plots(diagnosis.measures),
    )


def _row(
    name: str, tokens: TokenMismatch | None, routes: RoutingMismatch | None, *, replayed: bool = False
) -> MeasureRow | None:
    if tokens is None and routes is None:
        return None
    none = "0, forced" if replayed else percentage(None)
    return MeasureRow(
        name,
        scientific(tokens.k3 if tokens else None),
        percentage(tokens.f(2.0) if tokens else None),
        percentage(routes.differing_share) if routes else none,
        percentage(routes.differing_tokens_share) if routes else none,
    )

"""A diagnosis -> one self-contained HTML page, or a table of measures for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreroute.doctor import Diagnosis, Measures, Severity
from foreroute.mismatch import RoutingMismatch, TokenMismatch
from foreroute.report.format import Command, TableRow, Tile, percentage, scientific
from foreroute.report.template import write_html

WORDS = {Severity.FINE: "fine", Severity.NOTE: "note", Severity.WARNING: "warning", Severity.PROBLEM: "problem"}


def measure_rows(measures: Measures) -> list[TableRow]:
    """What was measured, one row per comparison; a dash means never measured."""
    rows = [
        _row("Engine and trainer, without replay", measures.without, measures.routes),
        _row("Engine and trainer, with replay", measures.with_replay, None, replayed=True),
        _row("Trainer and itself, same batches", measures.repeated, None),
        _row("Trainer and itself, packed differently", measures.repacked, measures.repacked_routes),
    ]
    return [row for row in rows if row is not None]


def write_diagnosis(diagnosis: Diagnosis, target: Path, commands: Sequence[Command] = ()) -> Path:
    """Write the page; one that is there is replaced. `commands` are what to run next.

    Raises:
        InputError: when `target` cannot be written or is no page of ours, or the `report` extra is not installed.
    """
    return write_html(target, "diagnosis.html.j2", lambda: _values(diagnosis) | {"commands": commands})


def _values(diagnosis: Diagnosis) -> dict[str, Any]:
    from foreroute.report.mismatch_plots import diagnosis_plots

    findings = sorted(diagnosis.findings, key=lambda finding: -finding.severity)
    return {
        "headline": diagnosis.headline,
        "tiles": _tiles(diagnosis.measures),
        "worst": WORDS[diagnosis.worst],
        "facts": diagnosis.facts,
        "findings": [(WORDS[finding.severity], finding) for finding in findings],
        "rows": measure_rows(diagnosis.measures),
        "plots": diagnosis_plots(diagnosis.measures),
    }


def _tiles(measures: Measures) -> list[Tile]:
    without, with_, routes = measures.without, measures.with_replay, measures.routes
    tiles = []
    if without is not None:
        against = f"{scientific(with_.k3)} with" if with_ else "not measured with replay"
        tiles.append(("k3 in nats per token, without replay", scientific(without.k3), against))
    if routes is not None:
        of_tokens = f"in {percentage(routes.differing_tokens_share)} of the tokens"
        tiles.append(("routing decisions that differ", percentage(routes.differing_share), of_tokens))
    return tiles


def _row(
    name: str, tokens: TokenMismatch | None, routes: RoutingMismatch | None, *, replayed: bool = False
) -> TableRow | None:
    if tokens is None and routes is None:
        return None
    none = "0, forced" if replayed else percentage(None)
    cells = {
        "k3, nats per token": scientific(tokens.k3 if tokens else None),
        "F(2)": percentage(tokens.f(2.0) if tokens else None),
        "Differing decisions": percentage(routes.differing_share) if routes else none,
        "Differing tokens": percentage(routes.differing_tokens_share) if routes else none,
    }
    return TableRow(label=name, cells=cells)

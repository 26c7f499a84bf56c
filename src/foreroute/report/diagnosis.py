"""A diagnosis -> one page; its measures as a table for a terminal too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foreroute.doctor import Diagnosis, Severity
from foreroute.doctor.evidence import Measures
from foreroute.mismatch import RoutingMismatch, TokenMismatch
from foreroute.report.diagnosis_plots import diagnosis_plots, explained
from foreroute.report.format import percentage, scientific
from foreroute.report.page import Column, Page, PageSection, Table, TableRow, Tile, Tone, write_page
from foreroute.report.run import further
from foreroute.report.run_tables import ABOUT_MEASURES

TONES: dict[Severity, Tone] = {
    Severity.FINE: "fine",
    Severity.NOTE: "note",
    Severity.WARNING: "warning",
    Severity.PROBLEM: "problem",
}
FINDINGS = (
    Column("", " "),
    Column("Topic", "topic", kind="words"),
    Column("Finding", "finding", kind="words"),
    Column("Advice", "advice", kind="words"),
)
ROOTS = (
    Column("Layer", "layer"),
    Column("Sequence", "sequence"),
    Column("Position", "position"),
    Column("Engine took", "engine took"),
    Column("Trainer takes", "trainer takes"),
    Column("Deficit", "deficit"),
    Column("Times the median", "times the median"),
)
MOST_ROOTS = 64
"""Rows of a table of roots."""
MEASURES = (
    Column("Compared", "compared"),
    Column("k3, nats per token", "k3"),
    Column("F(2)", "F(2)"),
    Column("Differing decisions", "differing decisions"),
    Column("Differing tokens", "differing tokens"),
)


def finding_table(diagnosis: Diagnosis) -> Table:
    """The findings, the worst first."""
    # the reader may stop after the first
    findings = sorted(diagnosis.findings, key=lambda finding: -finding.severity)
    rows = [
        TableRow(cells=(TONES[one.severity], one.topic, one.sentence, one.advice), tone=TONES[one.severity])
        for one in findings
    ]
    return Table(columns=FINDINGS, rows=tuple(rows))


def measure_table(measures: Measures) -> Table:
    """Measures, one row per comparison; a dash means never measured."""
    compared: tuple[tuple[str, TokenMismatch | None, RoutingMismatch | None], ...] = (
        ("Engine and trainer, without replay", measures.without, measures.routes),
        ("Engine and trainer, with replay", measures.with_replay, None),
        ("Trainer and itself, same batches", measures.repeated, None),
        ("Trainer and itself, packed differently", measures.repacked, measures.repacked_routes),
    )
    rows = []
    for name, tokens, routes in compared:
        if tokens is None and routes is None:
            continue
        shares = (routes.differing_share, routes.differing_tokens_share) if routes else (None, None)
        # with replay the routes are the engine's by construction, which nobody needs to measure
        forced = tokens is not None and tokens is measures.with_replay
        differing = ("0, forced",) * 2 if forced else tuple(map(percentage, shares))
        k3, f2 = (tokens.k3, tokens.f(2.0)) if tokens else (None, None)
        rows.append(TableRow(cells=(name, scientific(k3), percentage(f2), *differing)))
    return Table(title="Measures", columns=MEASURES, rows=tuple(rows))


def root_table(measures: Measures) -> Table:
    """Roots whose deficit stands far above those of the others, the largest first."""
    roots = measures.roots
    if roots is None:
        return Table(columns=ROOTS, rows=())
    rows = [
        TableRow(
            cells=(
                str(measures.layers[root.layer]),
                str(root.sequence),
                str(root.position),
                ", ".join(map(str, root.engine)),
                ", ".join(map(str, root.trainer)),
                f"{root.deficit:.3g}",
                f"{root.deficit / roots.median:.0f}",
            )
        )
        for root in roots.far[:MOST_ROOTS]
    ]
    return Table(columns=ROOTS, rows=tuple(rows))


def write_diagnosis(diagnosis: Diagnosis, target: Path, commands: Sequence[tuple[str, str]] = ()) -> Path:
    """Write the page, and on it commands to run next, each with what it does; raises `InputError` as `write_page`."""
    return write_page(target, lambda: _page(diagnosis, commands))


def _tiles(measures: Measures) -> tuple[Tile, ...]:
    """The parts of k3, and where the mismatch of routes begins."""
    tiles, split = [], measures.split
    if split is not None and measures.without is not None and measures.without.k3_sum:
        tiles = [
            Tile("k3, nats per token", scientific(measures.without.k3), "without replay"),
            Tile("routing's part", percentage(split.routing_share), "of k3; replay takes it away"),
            Tile("gate weights' and arithmetic's", percentage(1 - split.routing_share), "of k3; replay leaves it"),
        ]
    if measures.roots is not None and measures.roots.rows:
        tiles.append(Tile("roots", percentage(measures.roots.share), "of the routing decisions"))
    return tuple(tiles)


def _page(diagnosis: Diagnosis, commands: Sequence[tuple[str, str]]) -> Page:
    findings, measures, roots = (
        finding_table(diagnosis),
        measure_table(diagnosis.measures),
        root_table(diagnosis.measures),
    )
    attribution = diagnosis.measures.attribution
    sections = [PageSection(heading="Findings", tables=(findings,))] if findings.rows else []
    if measures.rows:
        replayed = diagnosis.measures.with_replay is not None
        about_replay = ["With replay the trainer must use the engine's experts, so none differ."] if replayed else []
        notes = (*ABOUT_MEASURES, *about_replay)
        sections.append(PageSection(heading="What was measured", tables=(measures,), notes=notes))
    return Page(
        command="foreroute doctor",
        title="Diagnosis",
        finding=diagnosis.headline,
        tone=TONES[diagnosis.worst],
        tiles=_tiles(diagnosis.measures),
        facts=diagnosis.facts,
        sections=(
            *sections,
            *(explained(attribution, diagnosis.measures.layers) if attribution is not None and attribution.k3 else ()),
            *([PageSection(heading="No near-ties", tables=(roots,))] if roots.rows else []),
            PageSection(heading="Where the routes part", plots=diagnosis_plots(diagnosis.measures)),
            *further(commands),
        ),
    )

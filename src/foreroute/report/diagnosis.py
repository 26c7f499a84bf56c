"""A diagnosis -> one page; its measures as a table for a terminal too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foreroute.doctor import Diagnosis, Severity
from foreroute.doctor.evidence import Measures
from foreroute.mismatch import RoutingMismatch, TokenMismatch
from foreroute.report.figure import (
    SIDE_COLOURS,
    card,
    integer_ticks,
    layer_label,
    new_axes,
    number_layers,
    percent_ticks,
)
from foreroute.report.format import INK, percentage, scientific
from foreroute.report.page import Caption, Column, Key, Page, PageSection, Plot, Table, TableRow, Tile, Tone, write_page
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
ABSENT = "Routes of the trainer and of the engine are needed for this; one of them was not given."
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
        ("Trainer and itself, packed differently", measures.repacked, measures.repacked_routes),
    )
    rows = []
    for name, tokens, routes in compared:
        if tokens is None and routes is None:
            continue
        shares = (routes.differing_share, routes.differing_tokens_share) if routes else (None, None)
        k3, f2 = (tokens.k3, tokens.f(2.0)) if tokens else (None, None)
        rows.append(TableRow(cells=(name, scientific(k3), percentage(f2), *map(percentage, shares))))
    return Table(title="Measures", columns=MEASURES, rows=tuple(rows))


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
    findings, measures = finding_table(diagnosis), measure_table(diagnosis.measures)
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
            PageSection(
                heading="Where the routes part", plots=(_by_layer(diagnosis.measures), _by_position(diagnosis.measures))
            ),
            *further(commands),
        ),
    )


def _by_layer(measures: Measures) -> Plot:
    said = Caption(
        title="Where in depth",
        sentence=(
            "Share of tokens whose expert set differs in a layer (bars), and of those whose first differing layer it "
            "is (line), without replay. Dark: roots, which differ on the engine's routes too; what is above them "
            "follows from roots in lower layers and earlier tokens."
        ),
        x_label=layer_label(measures.layers),
        y_label="share of tokens",
        absent=ABSENT,
    )
    routes = measures.routes
    if routes is None or not routes.rows:
        return Plot(caption=said)
    shares_L, first_L = routes.differing_share_L, routes.first_differing_L / routes.rows
    axes = new_axes()
    layers = np.arange(len(shares_L))
    roots = measures.roots
    axes.bar(layers, shares_L, color=SIDE_COLOURS["native"], alpha=0.75 if roots is None else 0.4, width=0.7)
    if roots is not None:
        axes.bar(layers, roots.share_L, color=SIDE_COLOURS["native"], width=0.7)
    axes.plot(layers, first_L, color=INK, marker="o", markersize=3.5)
    highest = float(max(shares_L.max(), 0.0 if roots is None else roots.share_L.max()))
    axes.set_ylim(0, max(1.1 * highest, 1e-3))
    number_layers(axes.xaxis, measures.layers)
    percent_ticks(axes.yaxis)
    by_layer = zip(measures.layers, shares_L, strict=True)
    alt = f"Tokens that differ: {', '.join(f'{layer} {share:.1%}' for layer, share in by_layer)}"
    return card(said, axes, alt, [Key("differs", SIDE_COLOURS["native"]), Key("differs first", INK)])


def _by_position(measures: Measures) -> Plot:
    said = Caption(
        title="Where in the sequence",
        sentence=(
            "Mean share of a token's experts that engine and trainer both picked, by position. A step points to a "
            "defect; noise is natural."
        ),
        x_label="position in the sequence",
        y_label="common experts",
        absent=ABSENT,
    )
    explained = measures.explanation
    if explained is None or not np.isfinite(explained.overlap_by_position_T).any():
        return Plot(caption=said)
    overlap_T = explained.overlap_by_position_T
    axes = new_axes()
    axes.plot(np.arange(len(overlap_T)), overlap_T, color=SIDE_COLOURS["native"])
    lowest = float(np.nanmin(overlap_T))
    room = 0.06 * max(1 - lowest, 0.05)
    # nearly all experts are common in a sound run; from 0 a step of a percent would not be seen
    axes.set_ylim(max(0.0, lowest - room), 1 + room)
    axes.set_yticks([tick for tick in axes.get_yticks() if max(0.0, lowest - room) <= tick <= 1])
    axes.xaxis.set_major_locator(integer_ticks(8))
    percent_ticks(axes.yaxis)
    return card(said, axes, f"Common experts from {np.nanmin(overlap_T):.1%} to {np.nanmax(overlap_T):.1%}")

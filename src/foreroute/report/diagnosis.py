"""A diagnosis -> one page; its measures as a table for a terminal too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foreroute.doctor import Diagnosis, Severity
from foreroute.doctor.attribution import Attribution
from foreroute.doctor.evidence import Measures
from foreroute.mismatch import RoutingMismatch, TokenMismatch
from foreroute.report.figure import (
    HEAT_INCHES,
    SIDE_COLOURS,
    card,
    integer_ticks,
    layer_label,
    new_axes,
    new_figure,
    number_layers,
    percent_ticks,
)
from foreroute.report.format import INK, percentage, scientific
from foreroute.report.page import Caption, Column, Key, Page, PageSection, Plot, Table, TableRow, Tile, Tone, write_page
from foreroute.report.run import further
from foreroute.report.run_tables import ABOUT_MEASURES
from foreroute.trace import RoutedLayer

TONES: dict[Severity, Tone] = {
    Severity.FINE: "fine",
    Severity.NOTE: "note",
    Severity.WARNING: "warning",
    Severity.PROBLEM: "problem",
}
FINDINGS = (
    Column("", " "),
    Column("Topic", "topic", content="words"),
    Column("Finding", "finding", content="words"),
    Column("Advice", "advice", content="words"),
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
TOKENS = (
    Column("Sequence", "sequence"),
    Column("Position", "position"),
    Column("Gap, nats", "gap"),
    Column("Routing", "routing"),
    Column("Flips at its input", "own"),
    Column("Largest flip", "flip"),
    Column("What it carries", "carries"),
    Column("Flips", "flips"),
)
MOST_MAPS = 4
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
    found, attribution = diagnosis.measures, diagnosis.measures.attribution
    findings, measures, roots = finding_table(diagnosis), measure_table(found), root_table(found)
    sections = [PageSection(heading="Findings", tables=(findings,))] if findings.rows else []
    if measures.rows:
        replayed = found.with_replay is not None
        about_replay = ["With replay the trainer must use the engine's experts, so none differ."] if replayed else []
        notes = (*ABOUT_MEASURES, *about_replay)
        sections.append(PageSection(heading="What was measured", tables=(measures,), notes=notes))
    return Page(
        command="foreroute doctor",
        title="Diagnosis",
        finding=diagnosis.headline,
        tone=TONES[diagnosis.worst],
        tiles=_tiles(found),
        facts=diagnosis.facts,
        sections=(
            *sections,
            *(_explained(attribution, found.layers) if attribution is not None and attribution.k3 else ()),
            *([PageSection(heading="No near-ties", tables=(roots,))] if roots.rows else []),
            PageSection(heading="Where the routes part", plots=(_by_layer(found), _by_position(found))),
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


def _explained(found: Attribution, layers: Sequence[RoutedLayer]) -> tuple[PageSection, ...]:
    """Lay out what an explanation found, as parts of a page."""
    rows = tuple(
        TableRow(
            cells=(
                str(token.sequence),
                str(token.position),
                f"{token.gap:+.3f}",
                f"{token.routing:+.3f}",
                f"{token.own:+.3f}",
                f"{layers[token.flip[1]]}, position {token.flip[0]}{', root' if token.is_root else ''}",
                f"{token.of_flip:+.3f}",
                str(token.num_flips),
            )
        )
        for token in found.tokens
        if token.flip is not None
    )
    notes = (
        f"Amounts are of first order, {found.error:.1%} off the exact sums over sequences.",
        "A layer carries what its flips add to the gap where all others stay as they are. It began what its roots do, "
        "the flips that stay where everything before them is the engine's. An arithmetic fault is not placed.",
        f"This took {found.forwards:.1f} forwards and {found.backwards:.0f} backwards of the rollout.",
    )
    exact = ("Amounts are exact: each flip was put on the engine's experts in one more pass.",)
    plots = _carried_by_layer(found, layers), _maps(found, layers)
    return (
        PageSection(heading="Which flips make the gap", plots=plots, notes=notes),
        PageSection(heading="Tokens that replay moves most", tables=(Table(columns=TOKENS, rows=rows),), notes=exact),
    )


def _carried_by_layer(found: Attribution, layers: Sequence[RoutedLayer]) -> Plot:
    own = ""
    if found.own_share is not None:
        own = f" Flips at tokens' own inputs make {found.own_share:.0%} of that in the worst sequences."
    said = Caption(
        title="k3 by layer",
        sentence=(
            f"What flips of a layer carry (bars), and what began there (dark): shares of k3, of which routing makes "
            f"{percentage(found.routing / found.k3) if found.routing > 0 else 'nothing'} in all.{own}"
        ),
        x_label=layer_label(layers),
        y_label="share of k3",
    )
    axes, colour = new_axes(), SIDE_COLOURS["native"]
    at_L = np.arange(len(found.carried_L))
    carried_L, began_L = found.carried_L / found.k3, found.began_L / found.k3
    axes.bar(at_L, carried_L, color=colour, alpha=0.4, width=0.7)
    axes.bar(at_L, began_L, color=colour, width=0.4)
    axes.axhline(0, color=INK, linewidth=0.8)
    number_layers(axes.xaxis, layers)
    percent_ticks(axes.yaxis)
    alt = ", ".join(f"{layer} {share:.1%}" for layer, share in zip(layers, carried_L, strict=True))
    return card(said, axes, f"Carried: {alt}", [Key("carried, and began in dark", colour)])


def _maps(found: Attribution, layers: Sequence[RoutedLayer]) -> Plot:
    from matplotlib.colors import TwoSlopeNorm

    said = Caption(
        title="Where in the worst sequences",
        sentence="What each flip adds to k3, by layer and position. Red raises the gap, blue takes from it.",
        x_label="position",
        y_label=layer_label(layers),
    )
    shown = found.worst[:MOST_MAPS]
    most = max(float(np.abs(each.k3_TL).max()) for each in shown) or 1.0
    # a few flips make most of it, and the others would not be seen
    figure, norm = new_figure(HEAT_INCHES), TwoSlopeNorm(vcenter=0.0, vmin=-1.0, vmax=1.0)
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, each in zip(panels, shown, strict=True):
        parts_LT = each.k3_TL.T / most
        shades_LT = np.sign(parts_LT) * np.sqrt(np.abs(parts_LT))
        axes.imshow(shades_LT, norm=norm, cmap="RdBu_r", aspect="auto", interpolation="nearest", origin="lower")
        title = f"sequence {each.sequence}, {each.share:.0%} of k3"
        axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=4)
        axes.grid(visible=False)
        axes.xaxis.set_major_locator(integer_ticks(6))
        number_layers(axes.yaxis, layers)
        axes.yaxis.set_major_locator(integer_ticks(3))
    panels[-1].set_xlabel(said.x_label)
    figure.supylabel(said.y_label, fontsize=11, color=INK)
    alt = "; ".join(f"sequence {each.sequence} {each.share:.0%} of k3" for each in shown)
    return card(said, figure, alt)

"""The plots and the table of an explained gap: k3 by layer, and where in the worst sequences it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from foreroute.doctor.attribution import Attribution
from foreroute.report.figure import (
    HEAT_INCHES,
    SIDE_COLOURS,
    card,
    integer_ticks,
    layer_label,
    new_axes,
    number_layers,
    percent_ticks,
)
from foreroute.report.format import INK
from foreroute.report.page import Caption, Column, Key, PageSection, Plot, Table, TableRow
from foreroute.trace import RoutedLayer

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


def explained(found: Attribution, layers: Sequence[RoutedLayer]) -> tuple[PageSection, ...]:
    """What an explanation found, as parts of a page."""
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
    plots = _by_layer(found, layers), _maps(found, layers)
    return (
        PageSection(heading="Which flips make the gap", plots=plots, notes=notes),
        PageSection(heading="Tokens that replay moves most", tables=(Table(columns=TOKENS, rows=rows),), notes=exact),
    )


def _by_layer(found: Attribution, layers: Sequence[RoutedLayer]) -> Plot:
    own = ""
    if found.own_share is not None:
        own = f" Flips at tokens' own inputs make {found.own_share:.0%} of that in the worst sequences."
    said = Caption(
        title="k3 by layer",
        sentence=(
            f"What flips of a layer carry (bars), and what began there (dark): shares of k3, of which routing makes "
            f"{found.routing / found.k3:.0%} in all.{own}"
        ),
        x_label=layer_label(layers),
        y_label="share of k3",
    )
    axes, colour = new_axes(), SIDE_COLOURS["native"]
    places = np.arange(len(found.carried_L))
    carried_L, began_L = found.carried_L / found.k3, found.began_L / found.k3
    axes.bar(places, carried_L, color=colour, alpha=0.4, width=0.7)
    axes.bar(places, began_L, color=colour, width=0.4)
    axes.axhline(0, color=INK, linewidth=0.8)
    number_layers(axes.xaxis, layers)
    percent_ticks(axes.yaxis)
    alt = ", ".join(f"{layer} {share:.1%}" for layer, share in zip(layers, carried_L, strict=True))
    return card(said, axes, f"Carried: {alt}", [Key("carried, and began in dark", colour)])


def _maps(found: Attribution, layers: Sequence[RoutedLayer]) -> Plot:
    said = Caption(
        title="Where in the worst sequences",
        sentence="What each flip adds to k3, by layer and position. Red raises the gap, blue takes from it.",
        x_label="position",
        y_label=layer_label(layers),
    )
    shown = found.worst[:MOST_MAPS]
    most = max(float(np.abs(each.k3_TL).max()) for each in shown) or 1.0
    # a few flips make most of it, and the others would not be seen
    figure, norm = Figure(figsize=HEAT_INCHES), TwoSlopeNorm(vcenter=0.0, vmin=-1.0, vmax=1.0)
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

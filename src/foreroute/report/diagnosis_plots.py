"""The plots of a diagnosis: where in depth, and where in the sequence, trainer and rollout engine are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foreroute.report.figure import (
    SIDE_COLOURS,
    card,
    integer_ticks,
    layer_label,
    new_axes,
    number_layers,
    percent_ticks,
)
from foreroute.report.format import INK
from foreroute.report.page import Caption, Key, Plot

if TYPE_CHECKING:
    from foreroute.doctor.evidence import Measures

ABSENT = "Routes of the trainer and of the engine are needed for this; one of them was not given."


def diagnosis_plots(measures: Measures) -> tuple[Plot, ...]:
    """Two cards; one without data says why."""
    return _by_layer(measures), _by_position(measures)


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

"""The plots of a plan: heat maps of its loads, and figures over layers, micro-steps, cells and methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from foreroute.report.figure import (
    INCHES,
    INK,
    OTHER,
    PART_COLOURS,
    PLANNED,
    RIVAL,
    STATIC,
    Caption,
    Key,
    Plot,
    card,
    heat_panels,
    integer_ticks,
    layer_label,
    new_axes,
    number_layers,
    spans,
    top_down,
)
from foreroute.report.format import step_time, time_unit

if TYPE_CHECKING:
    from foreroute.simulate.compare import MethodFigures
    from foreroute.trace import RoutedLayer

    Sides = tuple[MethodFigures, MethodFigures]
    """Static, and the plan."""

HELD = "#8fd3bd"
"""Paler than what a plan does."""
MICRO_STEP = "micro-step"
BAR_INCHES = 0.27
HEAT_INCHES = (5.0, 4.2)
TITLES = ("without balancing", "under the plan")
BOTH = (Key(TITLES[0], STATIC), Key(TITLES[1], PLANNED))


def load_of_ranks(sides: Sides, layers: Sequence[RoutedLayer]) -> Plot:
    """Load of every rank in every micro-step, in the layer that is the most uneven."""
    layer = int(sides[0].imbalance_ML.mean(axis=0).argmax())
    named = str(layers[layer]) if layers else f"routed layer {layer}, counted from 0"
    caption = Caption(
        title="Load of every rank",
        sentence=f"Assignments of each rank over the mean of its cell in {named}, the most uneven layer. "
        "Each column is a cell, which lasts as long as its slowest rank.",
        x_label="micro-step",
        y_label="rank",
    )
    return _heat_maps(caption, tuple(side.over_mean_MLG[:, layer].T for side in sides))


def load_of_cells(sides: Sides, layers: Sequence[RoutedLayer]) -> Plot:
    """The slowest rank of every cell."""
    caption = Caption(
        title="The slowest rank of every cell",
        sentence="Its load over the mean of the cell, in all layers and micro-steps.",
        x_label="micro-step",
        y_label=layer_label(layers),
    )
    return _heat_maps(caption, tuple(side.imbalance_ML.T for side in sides), from_one=True, layers=layers)


def time_by_part(sides: Sides) -> Plot:
    """Where the modelled time goes."""
    from foreroute.costs.pricing import PART_NAMES, STAGE_NAMES

    bars = [
        (f"{stage}, {name}", side.parts_MLSP.sum(axis=(0, 1))[s])
        for s, stage in enumerate(STAGE_NAMES)
        for name, side in zip(("without", "plan"), sides, strict=True)
    ]
    unit, size = time_unit(max(float(seconds_P.sum()) for _, seconds_P in bars))
    caption = Caption(
        title="Where the time goes (modelled)",
        sentence="Time of the step by the cost model, not measured: without balancing and under the plan.",
        x_label=f"{unit}, modelled",
        y_label="",
    )
    axes = new_axes()
    left_B = np.zeros(len(bars))
    for p, part in enumerate(PART_NAMES):
        width_B = np.array([seconds_P[p] for _, seconds_P in bars]) / size
        axes.barh(np.arange(len(bars)), width_B, left=left_B, color=PART_COLOURS[part], height=0.65)
        left_B += width_B
    axes.set_yticks(np.arange(len(bars)), [name for name, _ in bars])
    top_down(axes)
    said = ", ".join(f"{name} {step_time(float(v.sum()))}" for name, v in bars)
    return card(caption, axes, said, [Key(part, PART_COLOURS[part]) for part in PART_NAMES])


def by_method(records: Sequence[MethodFigures], least_seconds: float, rival: MethodFigures | None) -> Plot:
    """Modelled time of all methods; the last record is ours, and `rival` the strongest of the others."""
    unit, size = time_unit(max(record.seconds for record in records))
    caption = Caption(
        title="Time of the step by method (modelled)",
        sentence="Recompute and update by the cost model, not measured. The line is what no plan of any method can "
        "beat: experts level to the last row, and not one byte over any link.",
        x_label=f"{unit}, modelled",
        y_label="",
    )
    axes = new_axes((INCHES[0], 1.0 + BAR_INCHES * len(records)))
    times_B = np.array([record.seconds for record in records]) / size
    colours = {"static": STATIC, records[-1].name: PLANNED} | ({rival.name: RIVAL} if rival else {})
    axes.barh(
        np.arange(len(records)), times_B, color=[colours.get(record.name, OTHER) for record in records], height=0.7
    )
    for place, record in enumerate(records):
        axes.text(times_B[place], place, f" {step_time(record.seconds)}", va="center", fontsize=9.5, color=INK)
    axes.axvline(least_seconds / size, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_yticks(np.arange(len(records)), [record.label for record in records])
    axes.set_xlim(0, 1.2 * times_B.max())
    top_down(axes)
    said = ", ".join(f"{r.label} {step_time(r.seconds)}" for r in records)
    return card(caption, axes, said)


def _heat_maps(
    caption: Caption,
    sides: tuple[NDArray[np.float64], ...],
    *,
    from_one: bool = False,
    layers: Sequence[RoutedLayer] = (),
) -> Plot:
    loads = dict(zip(TITLES, sides, strict=True))
    figure = Figure(figsize=HEAT_INCHES)
    panels = figure.subplots(1, 2, sharey=True)
    heat_panels(figure, panels, loads, "over mean", from_one=from_one)
    for axes in panels:
        axes.set_xlabel(caption.x_label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(integer_ticks(5))
        if layers:
            number_layers(axes.yaxis, layers)
    panels[0].set_ylabel(caption.y_label)
    return card(caption, figure, spans(loads))


def _marker(values_X: NDArray[Any]) -> dict[str, Any]:
    """Points are marked where one or two of them make no line."""
    return {"marker": "o", "markersize": 4} if len(values_X) < 3 else {}

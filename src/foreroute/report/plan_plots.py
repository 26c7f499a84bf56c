"""The plots of a plan: heat maps of its loads, and figures over layers, micro-steps, cells and methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from foreroute.report.figure import (
    COLOURS,
    INCHES,
    INK,
    Caption,
    Key,
    Plot,
    card,
    heat_panels,
    integer_ticks,
    layer_label,
    new_axes,
    number_layers,
    percent_ticks,
    spans,
    top_down,
)
from foreroute.report.format import step_seconds, step_time

if TYPE_CHECKING:
    from foreroute.costs.figures import StepSummary
    from foreroute.plan.step_plan import StepPlan
    from foreroute.planner.compare import BalancerRecord
    from foreroute.trace import RoutedLayer

BEFORE, AFTER, STEP = COLOURS[1], COLOURS[0], COLOURS[6]
MICRO_STEP = "micro-step"
BAR_INCHES = 0.27
HEAT_INCHES = (5.0, 4.2)
TITLES = ("without balancing", "under the plan")
BOTH = (Key(TITLES[0], BEFORE), Key(TITLES[1], AFTER))


def stability(summary: StepSummary, layers: Sequence[RoutedLayer]) -> Plot:
    """How far micro-steps are from their step, and the step from the one before."""
    fluctuation_ML, drift_L = summary.fluctuation_ML, summary.drift_L
    caption = Caption(
        title="How stable the step is",
        sentence="Share of assignments that go to other experts: of each micro-step against the whole step (line: "
        "mean, band: least and most)"
        + (", and of the step against the step before." if drift_L is not None else ". The step before was not given."),
        x_label=layer_label(layers),
        y_label="share of assignments",
        absent="The step has no assignments.",
    )
    known_M = np.isfinite(fluctuation_ML).all(axis=1)
    if not known_M.any():
        return Plot(caption=caption)
    shares_ML = fluctuation_ML[known_M]
    keys = [Key("micro-steps against their step", AFTER)]
    keys += [] if drift_L is None else [Key("step against the step before", STEP)]
    axes = new_axes()
    places = np.arange(shares_ML.shape[1])
    axes.fill_between(places, shares_ML.min(axis=0), shares_ML.max(axis=0), color=AFTER, alpha=0.15, linewidth=0)
    axes.plot(places, shares_ML.mean(axis=0), color=AFTER, **_marker(places))
    if drift_L is not None:
        axes.plot(places, drift_L, color=STEP, **_marker(places))
    axes.set_ylim(bottom=0)
    number_layers(axes.xaxis, layers)
    percent_ticks(axes.yaxis)
    said = f"Micro-steps differ from their step by {shares_ML.min():.1%} to {shares_ML.max():.1%}"
    return card(caption, axes, said, keys)


def by_layer(summary: StepSummary, layers: Sequence[RoutedLayer]) -> Plot:
    """What a balancer sees that plans once for the step, and what the micro-steps are like."""
    caption = Caption(
        title="The step hides its micro-steps",
        sentence="Load of the slowest rank over the mean: if the whole step ran at once, which is all that a plan made "
        "once per step can level, and on average over its micro-steps.",
        x_label=layer_label(layers),
        y_label="slowest rank over mean",
    )
    lines = {
        "whole step at once": (STEP, summary.step_imbalance_L),
        "micro-steps, without balancing": (BEFORE, summary.before.imbalance_ML.mean(axis=0)),
        "micro-steps, under the plan": (AFTER, summary.after.imbalance_ML.mean(axis=0)),
    }
    axes = new_axes()
    for colour, values_L in lines.values():
        axes.plot(np.arange(len(values_L)), values_L, color=colour, **_marker(values_L))
    axes.set_ylim(bottom=0.95)
    number_layers(axes.xaxis, layers)
    said = spans({name: values_L for name, (_, values_L) in lines.items()})
    return card(caption, axes, said, [Key(name, colour) for name, (colour, _) in lines.items()])


def load_of_ranks(summary: StepSummary, layers: Sequence[RoutedLayer]) -> Plot:
    """Load of every rank in every micro-step, in the layer that is the most uneven."""
    layer = summary.most_uneven_layer
    named = str(layers[layer]) if layers else f"routed layer {layer}, counted from 0"
    caption = Caption(
        title="Load of every rank",
        sentence=f"Assignments of each rank over the mean of its cell in {named}, the most uneven layer. "
        "Each column is a cell, which lasts as long as its slowest rank.",
        x_label="micro-step",
        y_label="rank",
    )
    sides = (summary.before.over_mean_MLG[:, layer].T, summary.after.over_mean_MLG[:, layer].T)
    return _heat_maps(caption, sides)


def load_of_cells(summary: StepSummary, layers: Sequence[RoutedLayer]) -> Plot:
    """The slowest rank of every cell."""
    caption = Caption(
        title="The slowest rank of every cell",
        sentence="Its load over the mean of the cell, in all layers and micro-steps.",
        x_label="micro-step",
        y_label=layer_label(layers),
    )
    sides = (summary.before.imbalance_ML.T, summary.after.imbalance_ML.T)
    return _heat_maps(caption, sides, from_one=True, layers=layers)


def gap_to_bound(summary: StepSummary) -> Plot:
    """All cells, from the best to the worst."""
    bound_ML = summary.bound_ML
    before_C, after_C = (
        np.sort((side.imbalance_ML / bound_ML).ravel()) - 1 for side in (summary.before, summary.after)
    )
    caption = Caption(
        title="Gap to the bound",
        sentence="By how much the slowest rank's load exceeds the least that any plan of these homes and slots can "
        "reach, for all cells from the best to the worst.",
        x_label="share of cells",
        y_label="above the bound (logarithmic)",
    )
    least = 1e-4  # the axis is linear below it, so that a gap of exactly 0 can be shown
    axes = new_axes()
    share_C = (np.arange(len(before_C)) + 1) / len(before_C)
    for values_C, colour in ((before_C, BEFORE), (after_C, AFTER)):
        axes.plot(share_C, values_C, color=colour, drawstyle="steps-post", **_marker(values_C))
    axes.set_yscale("symlog", linthresh=least, linscale=0.5)
    axes.set_ylim(bottom=-least / 4)
    axes.set_xlim(0, 1)
    percent_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.yaxis.set_minor_locator(MaxNLocator(1))
    said = f"Half of the cells are within {np.median(after_C):.2%}, all within {after_C[-1]:.2%}"
    return card(caption, axes, said, BOTH)


def replicas(plan: StepPlan, summary: StepSummary) -> Plot:
    """What is held and what is fetched, over the micro-steps."""
    fetched_M, all_M = summary.fetched_ML.mean(axis=1), plan.num_replicas_ML.mean(axis=1)
    caption = Caption(
        title="Replicas and transfers",
        sentence="Replicas of a cell, on average over layers: those whose weights are fetched for it, and those that "
        "their slot holds since an earlier micro-step.",
        x_label=MICRO_STEP,
        y_label="replicas per cell",
        absent="The plan has no replicas.",
    )
    if not len(plan.expert_R):
        return Plot(caption=caption)
    axes = new_axes()
    steps = np.arange(len(all_M))
    axes.bar(steps, fetched_M, color=COLOURS[0], width=0.8)
    axes.bar(steps, all_M - fetched_M, bottom=fetched_M, color=COLOURS[5], width=0.8)
    axes.xaxis.set_major_locator(integer_ticks(8))
    said = f"{all_M.mean():.1f} replicas per cell, {fetched_M.mean():.1f} of them fetched"
    return card(caption, axes, said, [Key("fetched", COLOURS[0]), Key("held", COLOURS[5])])


def cross_node_traffic(summary: StepSummary) -> Plot:
    """Traffic between nodes, over the micro-steps."""
    caption = Caption(
        title="Traffic between nodes",
        sentence="Share of assignments that are served on another node than their token's, on average over layers.",
        x_label=MICRO_STEP,
        y_label="share of assignments",
        absent="All ranks are in one node: no traffic leaves it.",
    )
    sides = ((summary.before.crossing_ML.mean(axis=1), BEFORE), (summary.after.crossing_ML.mean(axis=1), AFTER))
    if not any(share_M.any() for share_M, _ in sides):
        return Plot(caption=caption)
    axes = new_axes()
    for share_M, colour in sides:
        axes.plot(np.arange(len(share_M)), share_M, color=colour, **_marker(share_M))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(integer_ticks(8))
    percent_ticks(axes.yaxis)
    before, after = summary.before.crossing, summary.after.crossing
    said = f"{before:.1%} without balancing, {after:.1%} under the plan"
    return card(caption, axes, said, BOTH)


def time_by_part(summary: StepSummary) -> Plot:
    """Where the modelled time goes."""
    from foreroute.costs.figures import PART_NAMES, STAGE_NAMES

    caption = Caption(
        title="Where the time goes (modelled)",
        sentence="Seconds of the step by the cost model, not measured: without balancing and under the plan.",
        x_label="seconds, modelled",
        y_label="",
    )
    sides = (("without", summary.before), ("plan", summary.after))
    bars = [
        (f"{stage}, {name}", side.parts_MLSP.sum(axis=(0, 1))[s])
        for s, stage in enumerate(STAGE_NAMES)
        for name, side in sides
    ]
    axes = new_axes()
    left_B = np.zeros(len(bars))
    for p in range(len(PART_NAMES)):
        width_B = np.array([seconds_P[p] for _, seconds_P in bars])
        axes.barh(np.arange(len(bars)), width_B, left=left_B, color=COLOURS[p], height=0.65)
        left_B += width_B
    axes.set_yticks(np.arange(len(bars)), [name for name, _ in bars])
    top_down(axes)
    said = ", ".join(f"{name} {step_time(float(v.sum()))}" for name, v in bars)
    return card(caption, axes, said, [Key(name, COLOURS[p]) for p, name in enumerate(PART_NAMES)])


def by_method(records: Sequence[BalancerRecord], summary: StepSummary) -> Plot:
    """Modelled time of all methods; the last record is ours."""
    caption = Caption(
        title="Time of the step by method (modelled)",
        sentence="Recompute and update by the cost model, not measured. The line is what no plan of any method can "
        "beat: experts level to the last row, and not one byte over any link.",
        x_label="seconds, modelled",
        y_label="",
    )
    axes = new_axes((INCHES[0], 1.0 + BAR_INCHES * len(records)))
    places = np.arange(len(records))
    colours = [*["#9aa5b1"] * (len(records) - 1), AFTER]
    axes.barh(places, [record.seconds for record in records], color=colours, height=0.7)
    for place, record in zip(places, records, strict=True):
        axes.text(record.seconds, place, f" {step_seconds(record.seconds)}", va="center", fontsize=9.5, color=INK)
    axes.axvline(summary.least_seconds, color=STEP, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_yticks(places, [record.label for record in records])
    axes.set_xlim(0, 1.12 * max(record.seconds for record in records))
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

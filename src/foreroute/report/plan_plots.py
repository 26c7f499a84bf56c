"""The plots of a plan: heat maps of its loads, and where the modelled time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreroute.costs.pricing import PART_NAMES
from foreroute.report.figure import PART_COLOURS, heat_maps, layer_label, stacked_bars
from foreroute.report.format import time_unit
from foreroute.report.page import Caption, Plot

if TYPE_CHECKING:
    from foreroute.simulate.compare import PlanComparison
    from foreroute.trace import RoutedLayer

HOME = "without balancing"


def load_of_ranks(found: PlanComparison, layers: Sequence[RoutedLayer]) -> Plot:
    """Load of every rank in every micro-step, in the layer that is the most uneven."""
    home_MLG, planned_MLG = found.at_home.over_mean_SMLG[0], found.planned.over_mean_SMLG[0]
    # one layer is shown whole; the most uneven has the most to gain, and hides the least
    layer = int(home_MLG.max(axis=-1).mean(axis=0).argmax())
    named = str(layers[layer]) if layers else f"routed layer {layer}, counted from 0"
    loads = {HOME: home_MLG[:, layer].T, _planned(found): planned_MLG[:, layer].T}
    said = Caption(
        title="Load of every rank",
        sentence=(
            f"Assignments of each rank over the mean of its cell in {named}, the most uneven layer. Each column is a "
            "cell, which lasts as long as its slowest rank."
        ),
        x_label="micro-step",
        y_label="rank",
    )
    return heat_maps(said, loads)


def load_of_cells(found: PlanComparison, layers: Sequence[RoutedLayer]) -> Plot:
    """The slowest rank of every cell."""
    said = Caption(
        title="The slowest rank of every cell",
        sentence="Its load over the mean of the cell, in all layers and micro-steps.",
        x_label="micro-step",
        y_label=layer_label(layers),
    )
    sides = {HOME: found.at_home, _planned(found): found.planned}
    loads = {title: side.over_mean_SMLG[0].max(axis=-1).T for title, side in sides.items()}
    return heat_maps(said, loads, from_one=True, layers=layers)


def time_by_part(found: PlanComparison) -> Plot:
    """Modelled time by part, as executors serve the plan."""
    methods = {HOME: found.methods[0], "as executed": found.methods[-1]}
    bars = [
        (title, [parts[part] for part in PART_NAMES])
        for passes in zip(*((one.recompute_parts, one.update_parts) for one in methods.values()), strict=True)
        for title, parts in zip(methods, passes, strict=True)
    ]
    unit, size = time_unit(max(float(sum(seconds)) for _, seconds in bars))
    headings = {0: "recompute", len(methods): "update"}
    colours = {part: PART_COLOURS[part] for part in PART_NAMES}
    said = Caption(
        title="Where the time goes (modelled)",
        sentence="Recompute and update by the cost model, not measured: without balancing and as executed.",
        x_label=f"{unit}, modelled",
        y_label="",
    )
    return stacked_bars(said, bars, colours, unit_s=size, headings=headings)


def _planned(found: PlanComparison) -> str:
    """The title of what the plan does: it says where that is not executed."""
    passes = found.passes_by_plan
    return "by the plan" + ("" if len(passes) == 2 else f" ({passes[0]})" if passes else " (not run)")

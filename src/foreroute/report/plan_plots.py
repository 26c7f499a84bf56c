"""The plots of a plan: heat maps of its loads, and where the modelled time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foreroute.report.figure import PART_COLOURS, heat_maps, layer_label, stacked_bars
from foreroute.report.format import time_unit
from foreroute.report.page import Plot, caption

if TYPE_CHECKING:
    from foreroute.simulate.compare import MethodFigures
    from foreroute.trace import RoutedLayer

    Sides = tuple[MethodFigures, MethodFigures]
    """Static, and the plan."""

TITLES = ("without balancing", "under the plan")


def load_of_ranks(sides: Sides, layers: Sequence[RoutedLayer]) -> Plot:
    """Load of every rank in every micro-step, in the layer that is the most uneven."""
    layer = int(sides[0].imbalance_ML.mean(axis=0).argmax())
    named = str(layers[layer]) if layers else f"routed layer {layer}, counted from 0"
    loads = {title: side.over_mean_MLG[:, layer].T for title, side in zip(TITLES, sides, strict=True)}
    return heat_maps(caption("plan_ranks", layer=named), loads)


def load_of_cells(sides: Sides, layers: Sequence[RoutedLayer]) -> Plot:
    """The slowest rank of every cell."""
    said = replace(caption("plan_cells"), y_label=layer_label(layers))
    loads = {title: side.imbalance_ML.T for title, side in zip(TITLES, sides, strict=True)}
    return heat_maps(said, loads, from_one=True, layers=layers)


def time_by_part(sides: Sides) -> Plot:
    """Where the modelled time goes."""
    from foreroute.costs.pricing import PART_NAMES
    from foreroute.plan.options import PASS_NAMES

    parts_SP = [side.parts_MLSP.sum(axis=(0, 1)) for side in sides]
    bars = [(title, parts[s]) for s in range(len(PASS_NAMES)) for title, parts in zip(TITLES, parts_SP, strict=True)]
    unit, size = time_unit(max(float(seconds_P.sum()) for _, seconds_P in bars))
    headings = {s * len(sides): name for s, name in enumerate(PASS_NAMES)}
    colours = {part: PART_COLOURS[part] for part in PART_NAMES}
    return stacked_bars(caption("plan_parts", unit=unit), bars, colours, unit_s=size, headings=headings)

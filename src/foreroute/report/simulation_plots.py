"""The plots of a simulated step: its phases, where its time goes, and a few layers rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from foreroute.report.figure import PART_COLOURS, card, new_axes, stacked_bars
from foreroute.report.format import GREY, INK, step_time
from foreroute.report.methods import modelled, named
from foreroute.report.page import Key, Plot, caption
from foreroute.simulate.records import compared

if TYPE_CHECKING:
    from foreroute.simulate import SimulationRecord, Timeline

PHASE_COLOURS = {
    "planning": PART_COLOURS["waiting for the plan"],
    "home moves": "#EEDD88",
    "publishing": "#BBCC33",
    "recompute": "#C9D3DE",
    "update": "#9AA9B8",
    "reduction": "#FFAABB",
    "optimizer": "#44BB99",
}
SPAN_COLOURS = {
    "attention": PART_COLOURS["attention"],
    "dispatch": PART_COLOURS["all-to-all"],
    "experts": PART_COLOURS["experts"],
    "combine": "#FFAABB",
    "fetch": "#44BB99",
    "waits for weights": PART_COLOURS["exposed transfers"],
}
NUM_RANKS = 4
"""Lanes of a timeline; more lanes than that are too thin to read."""
LANE_INCHES = 0.225


def by_phase(record: SimulationRecord) -> Plot:
    """The whole step of every method."""
    static = record["static"].phases
    forced_s = record.forced_balance_s + static.reduction + static.optimizer
    said = caption("phases", forced=step_time(forced_s), modelled=modelled(record))
    bars = [(named(method, record), tuple(method.phases)) for method in record.methods]
    return stacked_bars(said, bars, PHASE_COLOURS, line_s=forced_s)


def by_part(record: SimulationRecord) -> Plot:
    """Recompute and update of the methods that matter, by what they are spent on."""
    methods = (record["static"], *compared(record.methods))
    bars = [
        (named(method, record), [parts[part] for part in PART_COLOURS])
        for passes in zip(*((method.recompute_parts, method.update_parts) for method in methods), strict=True)
        for method, parts in zip(methods, passes, strict=True)
    ]
    said = caption("parts", modelled=modelled(record))
    return stacked_bars(said, bars, PART_COLOURS, headings={0: "recompute", len(methods): "update"})


def timelines(found: Sequence[Timeline], record: SimulationRecord) -> list[Plot]:
    """Cards that can be laid side by side: the same ranks, the same layers, the same scale of time.

    The first and the last layer of a timeline are left out where there are more than three: what is fetched for the
    layers around them would be missing there.
    """
    if not found:
        return []
    layers = sorted({span.layer for span in found[0].spans})
    layers = layers[1:-1] if len(layers) > 3 else layers
    ranks = _ranks(found[0], layers)
    # one scale, so that the faster method looks shorter
    longest_s = max(bounds[-1] - bounds[0] for bounds in (_bounds(one, layers) for one in found))
    return [_timeline(one, record, layers, ranks, longest_s) for one in found]


def _timeline(found: Timeline, record: SimulationRecord, layers: list[int], ranks: list[int], longest_s: float) -> Plot:
    from foreroute.simulate.timelines import RESOURCES

    said = caption(
        "timeline",
        method=named(record[found.method], record),
        first=layers[0],
        last=layers[-1],
        micro_step=found.micro_step,
        ranks=len(ranks),
        num_ranks=found.num_ranks,
        modelled=modelled(record),
    )
    *begins, end_s = _bounds(found, layers)
    begin_s = begins[0]
    spans = [span for span in found.spans if span.rank in ranks and span.end_s > begin_s and span.begin_s < end_s]
    places = {rank: n * (len(RESOURCES) + 0.6) for n, rank in enumerate(ranks)}
    axes = new_axes((5.0, 0.9 + LANE_INCHES * len(ranks) * (len(RESOURCES) + 0.6)))
    for span in spans:
        place = places[span.rank] + RESOURCES.index(span.resource)
        left, right = max(span.begin_s, begin_s) - begin_s, min(span.end_s, end_s) - begin_s
        axes.barh(place, 1e3 * (right - left), left=1e3 * left, color=SPAN_COLOURS[span.what], height=0.82)
    for layer, start_s in zip(layers, begins, strict=True):
        axes.axvline(1e3 * (start_s - begin_s), color=GREY, linewidth=0.8)
        axes.annotate(
            f"layer {layer}", (1e3 * (start_s - begin_s), 1), xycoords=("data", "axes fraction"), xytext=(3, 2),
            textcoords="offset points", fontsize=9.5, color=INK,
        )  # fmt: skip
    lanes = {
        place + n: name if n else f"rank {rank}   {name}"
        for rank, place in places.items()
        for n, name in enumerate(RESOURCES)
    }
    axes.set_yticks(list(lanes), list(lanes.values()), fontsize=9)
    axes.set_xlim(0, 1e3 * longest_s)
    axes.set_ylim(max(lanes) + 0.6, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    seen = {span.what for span in spans}
    keys = [Key(what, colour) for what, colour in SPAN_COLOURS.items() if what in seen]
    return card(said, axes, f"{len(layers)} layers take {1e3 * (end_s - begin_s):.3g} ms", keys)


def _ranks(found: Timeline, layers: list[int]) -> list[int]:
    """From the most to the least work for the experts."""
    work_G = np.zeros(found.num_ranks)
    for span in found.spans:
        if span.what == "experts" and span.layer in layers:
            work_G[span.rank] += span.end_s - span.begin_s
    # the ranks that others wait for, and those that wait
    order = np.argsort(-work_G, kind="stable")
    chosen = np.unique(np.linspace(0, found.num_ranks - 1, min(NUM_RANKS, found.num_ranks)).round().astype(int))
    ranks: list[int] = order[chosen].tolist()
    return ranks


def _bounds(found: Timeline, layers: list[int]) -> list[float]:
    """Seconds at which each layer begins, and at which the last one ends."""
    begins = [
        min(span.begin_s for span in found.spans if span.layer == layer and span.resource == "compute")
        for layer in layers
    ]
    return [*begins, max(span.end_s for span in found.spans if span.layer == layers[-1])]

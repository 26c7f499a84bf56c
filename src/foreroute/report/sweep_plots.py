"""What the gain depends on: one small plot for each thing that was varied, and all points against static imbalance."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from foreroute.report.figure import FORCED, GREY, PLANNED, PLANNED_OTHERWISE, RIVAL, Caption, Key, Plot, card, new_axes
from foreroute.report.format import duration
from foreroute.report.simulation import compared_methods, headline, is_ours, named

if TYPE_CHECKING:
    from foreroute.simulate import SimulateConfig, SimulationRecord, SweepRecord

SMALL_INCHES = (4.2, 2.7)
WORDS = {
    "skew": ("Skew of the experts", "skew, 1 as the workload has it"),
    "tokens_per_rank": ("Micro-batch size", "tokens of a GPU in a micro-step"),
    "expert_parallel": ("EP size", "GPUs of an expert-parallel group"),
    "redundant_slots": ("Redundant slots", "slots per GPU and layer"),
    "node_bandwidth": ("NVLink-class bandwidth", "times the configured bandwidth"),
    "cluster_bandwidth": ("NIC bandwidth", "times the configured bandwidth"),
    "host_bandwidth": ("Bandwidth from host memory", "times the configured bandwidth"),
    "overlap": ("All-to-alls behind compute", "share of the computing time that hides them"),
    "planning_s": ("Planning time", "seconds of planning a step"),
}
NOTES = {
    "expert_parallel": " Unless the configuration names a workload, every EP size has its own.",
    "redundant_slots": " Methods with slots of their own number do not change.",
    "planning_s": " The first micro-steps are planned first, and the recompute waits for these.",
}


def sensitivities(record: SimulationRecord, config: SimulateConfig, sweeps: Sequence[SweepRecord]) -> list[Plot]:
    """One card for each key, in the order of `WORDS`. All but planning time share one scale of gains."""
    by_key = {key: list(points) for key, points in groupby(sorted(sweeps, key=_order), key=lambda one: one.key)}
    # One scale for all cards, so that their slopes can be compared.
    gains = [
        gain
        for one in (record, *(point.simulation for point in sweeps if point.key != "planning_s"))
        for gain in (*(one[name].speedup_over_static for name in _colours(record)), _forced_gain(one))
    ]
    return [_card(key, record, config, points, (min(gains), max(gains))) for key, points in by_key.items()]


def _order(point: SweepRecord) -> tuple[int, float]:
    return list(WORDS).index(point.key), point.value


def _card(
    key: str, record: SimulationRecord, config: SimulateConfig, points: list[SweepRecord], span: tuple[float, float]
) -> Plot:
    title, x_label = WORDS[key]
    configured, waits = _configured(key, record, config), key == "planning_s"
    known = {point.value: point.simulation for point in points}
    places = sorted(({configured: record} | known).items())
    caption = Caption(
        title=title,
        sentence=_said(key, configured, config) + NOTES.get(key, "") + _marked(places, headline(record).name),
        x_label=x_label,
        y_label="recompute waits, s" if waits else "speedup over static",
    )
    axes = new_axes(SMALL_INCHES)
    x = [value for value, _ in places]
    if not waits:
        axes.plot(x, [_forced_gain(one) for _, one in places], color=FORCED, linestyle=(0, (4, 2)), linewidth=1.3)
    for name, colour in reversed(_colours(record).items()):
        same = [one[name] for _, one in places]
        y = [one.stages.planning if waits else one.speedup_over_static for one in same]
        axes.plot(x, y, color=colour, marker="o", markersize=4.2)
    axes.axvline(configured, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))
    _x_axis(axes, list(known) if waits else x)
    low, high = (0.0, None) if waits else (min(1.0, span[0]) - 0.03, span[1] + 0.05 * (span[1] - 0.95))
    axes.set_ylim(low, high)
    main = headline(record).name
    said = "; ".join(
        f"{value:,.4g}: {one[main].stages.planning if waits else one[main].speedup_over_static:.3g}"
        for value, one in places
    )
    return card(caption, axes, said)


def _x_axis(axes: Any, values: list[float]) -> None:
    """Ticks at the values; factors and sizes on a logarithmic axis, so that doublings are equally far apart."""
    if min(values) > 0 and max(values) / min(values) >= 4:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(values, [_short(value) for value in values])


def _short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 512 == 0 else f"{value:g}"


def legend(record: SimulationRecord) -> list[Key]:
    """What the lines and points of all cards are."""
    methods = [Key(named(record[name], record), colour) for name, colour in _colours(record).items()]
    return [*methods, Key("forced balance", FORCED, "6 3")]


def _colours(record: SimulationRecord) -> dict[str, str]:
    """Of the methods that are compared, by name."""
    names = [method.name for method in compared_methods(record)]
    plans = [name for name in names if is_ours(name)]
    return dict.fromkeys(names, RIVAL) | dict(zip(plans, (PLANNED, PLANNED_OTHERWISE), strict=False))


def _forced_gain(record: SimulationRecord) -> float:
    return record["static"].training_s / record.forced_balance_s


def _said(key: str, configured: float, config: SimulateConfig) -> str:
    from foreroute.simulate.config import BANDWIDTHS

    if key in BANDWIDTHS:
        rate = getattr(config.described().topology.links, BANDWIDTHS[key])
        return f"As configured: {rate / 1e9:,.4g} GB/s per GPU."
    if key == "planning_s" and config.execution.planning_s is None:
        return f"Measured here: {duration(configured)}."
    return f"As configured: {configured:,.4g}."


def _marked(places: list[tuple[float, SimulationRecord]], method: str) -> str:
    """At which values no executor carries the method out."""
    values = [_short(value) for value, one in places if one[method].not_executed]
    if len(values) == len(places):
        return " Not executed."
    return f" Not executed at {', '.join(values)}." if values else ""


def _configured(key: str, record: SimulationRecord, config: SimulateConfig) -> float:
    """The value that the configuration has."""
    from foreroute.simulate.config import PLACES

    if key not in PLACES:
        return 1.0
    value = getattr(getattr(config, PLACES[key]), key)
    if value is not None:
        return float(value)
    return headline(record).planning_s if key == "planning_s" else record.tokens_per_rank

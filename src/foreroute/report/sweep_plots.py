"""What the gain depends on: one small plot for each thing that was varied, and all points against static imbalance."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from foreroute.report.figure import GREY, Caption, Key, Plot, card, new_axes, percent_ticks
from foreroute.report.format import duration, over_mean
from foreroute.report.simulation import compared_methods, headline

if TYPE_CHECKING:
    from foreroute.simulate import SimulateConfig, SimulationRecord, SweepRecord

COLOURS = ("#0072B2", "#009E73", "#E69F00")
FORCED = "#55606c"
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
MARKERS = {"skew": ("o", "circles: skew"), "tokens_per_rank": ("s", "squares: tokens per GPU"),
           "expert_parallel": ("^", "triangles: EP size")}  # fmt: skip
"""What changes the static imbalance."""


def sensitivities(record: SimulationRecord, config: SimulateConfig, sweeps: Sequence[SweepRecord]) -> list[Plot]:
    """One card for each key, in the order of `WORDS`. All but planning time share one scale of gains."""
    by_key = {key: list(points) for key, points in groupby(sorted(sweeps, key=_order), key=lambda one: one.key)}
    # One scale for all cards, so that their slopes can be compared.
    gains = [
        gain
        for one in (record, *(point.simulation for point in sweeps if point.key != "planning_s"))
        for gain in (*(method.speedup_over_static for method in _drawn(record, one)), _forced_gain(one))
    ]
    return [_card(key, record, config, points, (min(gains), max(gains))) for key, points in by_key.items()]


def against_imbalance(record: SimulationRecord, sweeps: Sequence[SweepRecord]) -> list[Plot]:
    """Gains over static, and speeds relative to forced balance, against the imbalance that static has."""
    points = [("D", record), *((MARKERS[one.key][0], one.simulation) for one in sweeps if one.key in MARKERS)]
    used = [words for key, (_, words) in MARKERS.items() if any(one.key == key for one in sweeps)]
    note = f"Diamonds: as configured; {'; '.join(used)}."
    gains = Caption(
        title="Gains against static imbalance",
        sentence="Static over this method, recompute and update, for every simulated step whose routing or group is "
        "another. There is no one gain: it depends on how uneven the experts are. Hollow: forced balance.",
        x_label="static: load of the slowest rank over the mean",
        y_label="static / this",
        absent="Nothing was varied that changes the imbalance: sweep over skew, tokens_per_rank or expert_parallel.",
    )
    if len(points) < 2:
        return [Plot(caption=gains)]
    shares = Caption(
        title="Speed relative to forced balance, against static imbalance",
        sentence="Time under forced balance over that of this method, for the same steps. Above 100 % a method keeps "
        "more tokens in their node than uniform traffic would.",
        x_label="static: load of the slowest rank over the mean",
        y_label="speed over that of forced balance",
    )
    return [_scatter(gains, record, points, note, shares=False), _scatter(shares, record, points, note, shares=True)]


def _scatter(
    caption: Caption,
    record: SimulationRecord,
    points: Sequence[tuple[str, SimulationRecord]],
    note: str,
    *,
    shares: bool,
) -> Plot:
    names = [method.name for method in compared_methods(record)]
    axes = new_axes()
    for marker, one in points:
        x, size = one["static"].imbalance, 7.0 if marker == "D" else 5.5
        if not shares:
            axes.plot(x, _forced_gain(one), marker=marker, color=FORCED, fillstyle="none", markersize=size + 3)
        for method in _drawn(record, one):
            y = method.share_of_forced_balance if shares else method.speedup_over_static
            axes.plot(x, y, marker=marker, color=COLOURS[names.index(method.name)], markersize=size, alpha=0.8)
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    if shares:
        percent_ticks(axes.yaxis, decimals=0)
    main = headline(record).name
    said = "; ".join(
        f"{over_mean(one['static'].imbalance)}: "
        f"{one[main].share_of_forced_balance if shares else one[main].speedup_over_static:.3g}"
        for _, one in points
    )
    drawn = [key for key in legend(record) if not (shares and key.dashed)]
    return card(caption, axes, said, drawn, (note,))


def _order(point: SweepRecord) -> tuple[int, float]:
    return list(WORDS).index(point.key), point.value


def _card(
    key: str, record: SimulationRecord, config: SimulateConfig, points: list[SweepRecord], span: tuple[float, float]
) -> Plot:
    title, x_label = WORDS[key]
    configured, waits = _configured(key, record, config), key == "planning_s"
    caption = Caption(
        title=title,
        sentence=_said(key, configured, config) + NOTES.get(key, ""),
        x_label=x_label,
        y_label="recompute waits, s" if waits else "static / this",
    )
    known = {point.value: point.simulation for point in points}
    places = sorted(({configured: record} | known).items())
    methods = compared_methods(record)
    axes = new_axes(SMALL_INCHES)
    x = [value for value, _ in places]
    if not waits:
        axes.plot(x, [_forced_gain(one) for _, one in places], color=FORCED, linestyle=(0, (4, 2)), linewidth=1.3)
    for n, method in reversed(list(enumerate(methods))):
        same = [one[method.name] for _, one in places]
        y = [one.stages.planning if waits else one.speedup_over_static for one in same]
        axes.plot(x, y, color=COLOURS[n], marker="o", markersize=4.2)
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
    named = [Key(method.label, colour) for method, colour in zip(compared_methods(record), COLOURS, strict=False)]
    return [*named, Key("forced balance", FORCED, dashed=True)]


def _drawn(record: SimulationRecord, one: SimulationRecord) -> list[Any]:
    names = [method.name for method in compared_methods(record)]
    return [method for method in one.methods if method.name in names]


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


def _configured(key: str, record: SimulationRecord, config: SimulateConfig) -> float:
    """The value that the configuration has."""
    from foreroute.simulate.config import PLACES

    if key not in PLACES:
        return 1.0
    value = getattr(getattr(config, PLACES[key]), key)
    if value is not None:
        return float(value)
    return headline(record).planning_s if key == "planning_s" else record.tokens_per_rank

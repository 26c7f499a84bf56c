"""Dependence of the gain: one small plot for each thing that was varied, and all points against static imbalance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foreroute.report.figure import BASELINE, FORCED, PLANNED, PLANNED_OTHERWISE, card, new_axes
from foreroute.report.format import GREY, duration
from foreroute.report.methods import named
from foreroute.report.page import Key, Plot, caption
from foreroute.simulate.records import compared, headline

if TYPE_CHECKING:
    from foreroute.simulate import SimulateConfig, SimulationRecord, SweepRecord

SMALL_INCHES = (4.2, 2.7)


def sensitivities(record: SimulationRecord, config: SimulateConfig, sweeps: Sequence[SweepRecord]) -> list[Plot]:
    """One card for each key, in the order of the points. All but planning time share one scale of gains."""
    by_key: dict[str, dict[float, SimulationRecord]] = {}
    for point in sweeps:
        by_key.setdefault(point.key, {})[point.value] = point.simulation
    # One scale for all cards, so that their slopes can be compared.
    gains = [
        gain
        for one in (record, *(point.simulation for point in sweeps if point.key != "planning_s"))
        for gain in (*(one[name].speedup_over_static for name in _colours(record)), _forced_gain(one))
    ]
    return [_card(key, record, config, known, (min(gains), max(gains))) for key, known in by_key.items()]


def legend(record: SimulationRecord) -> list[Key]:
    """Legend of the lines and points of all cards."""
    methods = [Key(named(record[name], record), colour) for name, colour in _colours(record).items()]
    return [*methods, Key("forced balance", FORCED, "6 3")]


def _card(
    key: str,
    record: SimulationRecord,
    config: SimulateConfig,
    known: dict[float, SimulationRecord],
    span: tuple[float, float],
) -> Plot:
    configured, waits, main = _configured(key, record, config), key == "planning_s", headline(record.methods).name
    # the configured value is a point too, simulated already
    places = sorted(({configured: record} | known).items())
    said = caption(key)
    sentences = (_as_configured(key, configured, config), said.sentence, _not_executed(places, main))
    axes = new_axes(SMALL_INCHES)
    x = [value for value, _ in places]
    if not waits:
        axes.plot(x, [_forced_gain(one) for _, one in places], color=FORCED, linestyle=(0, (4, 2)), linewidth=1.3)
    for name, colour in reversed(_colours(record).items()):
        same = [one[name] for _, one in places]
        y = [one.phases.planning if waits else one.speedup_over_static for one in same]
        axes.plot(x, y, color=colour, marker="o", markersize=4.2)
    axes.axvline(configured, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))
    _x_axis(axes, list(known) if waits else x)
    low, high = (0.0, None) if waits else (min(1.0, span[0]) - 0.03, span[1] + 0.05 * (span[1] - 0.95))
    axes.set_ylim(low, high)
    alt = "; ".join(
        f"{value:,.4g}: {one[main].phases.planning if waits else one[main].speedup_over_static:.3g}"
        for value, one in places
    )
    return card(replace(said, sentence=" ".join(filter(None, sentences))), axes, alt)


def _x_axis(axes: Any, values: list[float]) -> None:
    """Ticks at the values; factors and sizes on a logarithmic axis, so that doublings are equally far apart."""
    if min(values) > 0 and max(values) / min(values) >= 4:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(values, [_short(value) for value in values])


def _short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 512 == 0 else f"{value:g}"


def _colours(record: SimulationRecord) -> dict[str, str]:
    """Give the colours of the methods that are compared, by name."""
    names = [method.name for method in compared(record.methods)]
    plans = [name for name in names if record[name].is_plan]
    return dict.fromkeys(names, BASELINE) | dict(zip(plans, (PLANNED, PLANNED_OTHERWISE), strict=False))


def _forced_gain(record: SimulationRecord) -> float:
    return record["static"].training_s / record.forced_balance_s


def _as_configured(key: str, configured: float, config: SimulateConfig) -> str:
    from foreroute.simulate.config import BANDWIDTHS

    if key in BANDWIDTHS:
        rate = getattr(config.described().topology.links, BANDWIDTHS[key])
        return f"As configured: {rate / 1e9:,.4g} GB/s per GPU."
    if key == "planning_s" and config.execution.planning_s is None:
        return f"Measured here: {duration(configured)}."
    return f"As configured: {configured:,.4g}."


def _not_executed(places: list[tuple[float, SimulationRecord]], method: str) -> str:
    """At which values no executor carries the method out."""
    values = [_short(value) for value, one in places if one[method].not_executed]
    if len(values) == len(places):
        return "Not executed."
    return f"Not executed at {', '.join(values)}." if values else ""


def _configured(key: str, record: SimulationRecord, config: SimulateConfig) -> float:
    """The value that the configuration has."""
    from foreroute.simulate.config import PLACES

    if key not in PLACES:
        return 1.0
    value = getattr(getattr(config, PLACES[key]), key)
    if value is not None:
        return float(value)
    return headline(record.methods).planning_s if key == "planning_s" else record.tokens_per_rank

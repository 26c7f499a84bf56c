"""The plots of a simulated step: its phases, and where its time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreroute.report.figure import PART_COLOURS, stacked_bars
from foreroute.report.format import step_time
from foreroute.report.methods import modelled, named
from foreroute.report.page import Caption, Plot
from foreroute.simulate.records import compared

if TYPE_CHECKING:
    from foreroute.simulate import SimulationRecord

PHASE_COLOURS = {
    "planning": PART_COLOURS["waiting for the plan"],
    "home moves": "#EEDD88",
    "publishing": "#BBCC33",
    "recompute": "#C9D3DE",
    "update": "#9AA9B8",
    "reduction": "#FFAABB",
    "optimizer": "#44BB99",
}


def by_phase(record: SimulationRecord) -> Plot:
    """The whole step of every method."""
    static = record["static"].phases
    forced_s = record.forced_balance_s + static.reduction + static.optimizer
    said = Caption(
        title="The step by method",
        sentence=(
            "From the end of the rollout to new weights, phase after phase. Planning is only what the recompute waits "
            f"for. The line is the same step under forced balance, {step_time(forced_s)}."
        ),
        x_label=f"seconds, {modelled(record)}",
        y_label="",
    )
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
    said = Caption(
        title="What recompute and update are spent on",
        sentence=(
            "Seconds of the slowest expert-parallel group. All-to-alls and experts last as long as their slowest "
            "rank; exposed transfers are waits for weights and gradients that move. Waiting for the plan delays the "
            "recompute and counts as planning elsewhere."
        ),
        x_label=f"seconds, {modelled(record)}",
        y_label="",
    )
    return stacked_bars(said, bars, PART_COLOURS, headings={0: "recompute", len(methods): "update"})

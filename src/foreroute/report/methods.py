"""Methods side by side, as a table, a plot and in a sentence: shared by the page of a plan and that of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foreroute.report.figure import stacked_bars
from foreroute.report.format import TIMES, as_fast, duration, flattened, over_mean, percentage, size, step_time, times
from foreroute.report.page import Caption, Column, Plot, Table, TableRow

if TYPE_CHECKING:
    from foreroute.simulate.records import MethodRecord, SimulatedMethod, SimulationRecord

BOUND = "lower bound"
"""The row of what no plan can beat, and no real plan attains."""
# Each with what it shows of a record; the second number is the seconds of static. `MethodRecord` and `SimulatedMethod`
# explain the figures. Nothing of planning is said of static, which plans nothing.
SHOWN: dict[Column, Callable[[Any, float], str]] = {
    Column("Method", " "): lambda one, _: one.label,
    Column("Executed", "exe-\ncuted"): lambda one, _: "no" if one.not_executed else "yes",
    Column("Recompute and update, modelled", "step"): lambda one, _: step_time(one.training_s),
    Column("Speedup over static", "speedup\nover\nstatic"): lambda one, static_s: times(static_s / one.training_s),
    Column("Homes move in, modelled", "homes\nmove in"): lambda one, _: duration(one.moves_s) if one.moves_s else "",
    Column("Speedup over static, home moves too", "speedup\nover\nstatic"): lambda one, static_s: times(
        static_s / one.step_s
    ),
    Column("Share of forced balance", "of\nforced\nbalance"): lambda one, _: percentage(one.share_of_forced_balance),
    Column("Share of the bound"): lambda one, _: percentage(one.share_of_bound),
    Column("Slowest rank over mean", f"slowest\nrank,\n{TIMES} mean"): lambda one, _: over_mean(one.imbalance),
    Column("In 99 % of cells"): lambda one, _: over_mean(one.imbalance_99),
    Column("In the worst cell", "in the\nworst\ncell"): lambda one, _: over_mean(one.imbalance_worst),
    Column("Wait for the plan"): lambda one, _: of_planning(one, duration(one.phases.planning)),
    Column("Home moves"): lambda one, _: duration(one.phases.home_moves) if one.phases.home_moves else "",
    Column("Exposed transfers"): lambda one, _: percentage(one.exposed_share),
    Column("Experts fetched per cell"): lambda one, _: f"{one.fetches_per_cell:.1f}",
    Column("Homes moved, once", "moved,\nonce"): lambda one, _: size(one.home_bytes) if one.home_bytes else "",
    Column("Weights fetched in a pass", "fetched\nin a pass"): lambda one, _: (
        size(one.fetched_bytes) if one.fetched_bytes else ""
    ),
    Column("Homes moved"): lambda one, _: f"{one.home_moves:,}",
    Column("Served across nodes", "served\nacross\nnodes"): lambda one, _: f"{one.cross_node_share:.0%}",
    Column("Planning time", "to plan"): lambda one, _: of_planning(one, duration(one.planning_s)),
    Column("GPU-hours saved", "GPU-hours\nsaved"): lambda one, _: of_planning(
        one, percentage(one.gpu_hours_saved / (one.gpu_hours + one.gpu_hours_saved))
    ),
}
"""The columns of tables of methods. Columns without a short heading are on pages alone."""


def of_planning(record: MethodRecord, text: str) -> str:
    """Text about a method that plans; nothing for static."""
    return "" if record.name == "static" else text


def method_table(
    records: Sequence[MethodRecord],
    headings: Sequence[str],
    limits: Mapping[str, Mapping[str, str]],
    *,
    title: str,
    strong: Callable[[MethodRecord], bool],
) -> Table:
    """One row per record, static among them, then the limits, which are cells by heading by label.

    `headings` name columns of `SHOWN`; `strong` says whether a row is what the page is about.
    """
    # pages name headings, so that each has its own columns in its own order
    by_heading = {column.heading: column for column in SHOWN}
    columns = tuple(by_heading[heading] for heading in headings)
    static_s = next(record.training_s for record in records if record.name == "static")
    rows = [
        TableRow(cells=tuple(SHOWN[column](record, static_s) for column in columns), strong=strong(record))
        for record in records
    ]
    for label, cells in limits.items():
        # limits have no plan and no planning, so most of their cells are empty
        shown = {"Method": label, **cells}
        rows.append(TableRow(cells=tuple(shown.get(heading, "") for heading in headings)))
    return Table(title=title, columns=columns, rows=tuple(rows))


def passes_by_part(
    caption: Caption, methods: Mapping[str, MethodRecord], colours: Mapping[str, str], *, unit_s: float = 1.0
) -> Plot:
    """Recompute of each method, given by its label, then update of each, by what they are spent on."""
    recompute = [(label, one.recompute_parts) for label, one in methods.items()]
    update = [(label, one.update_parts) for label, one in methods.items()]
    bars = [(label, [parts[part] for part in colours]) for label, parts in (*recompute, *update)]
    return stacked_bars(caption, bars, colours, unit_s=unit_s, headings={0: "recompute", len(methods): "update"})


def worth(static_s: float, main_s: float, other_s: float = 0.0, other_label: str = "") -> str:
    """Speed of a method beside static and, where it has a label, beside the strongest other method."""
    text = f"{as_fast(static_s, main_s)} static"
    if not other_label:
        return text
    return f"{text} and {as_fast(other_s, main_s)} {other_label}, the fastest other balancer"


def named(method: SimulatedMethod, record: SimulationRecord) -> str:
    """The label, marked where no executor carries the method out. Where none carries out static, `modelled` says so."""
    is_marked = method.not_executed and not record["static"].not_executed
    return f"{method.label} (not executed)" if is_marked else method.label


def modelled(record: SimulationRecord) -> str:
    """Mark of all seconds, for axes."""
    return "modelled, not executed" if record["static"].not_executed else "modelled"


def settings_table(values: Mapping[str, Any], folded: str) -> Table:
    """Every key and its value, folded under these words."""
    rows = tuple(TableRow(cells=setting) for setting in flattened(values).items())
    return Table(columns=(Column("Key"), Column("Value", content="words")), rows=rows, folded=folded)

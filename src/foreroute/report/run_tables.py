"""The tables of runs: mismatch and reward, alarms, load of the ranks, what was run, and settings. No plots.

Most have a column or a chip of its colour for each run; `colours` are those of the runs on the plots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Literal, TypeVar, get_args

from foreroute.records import Run, StepRecord
from foreroute.records.step_record import (
    SIDES,
    WORDS,
    AlarmName,
    ExecutionRecord,
    Load,
    PackingFigure,
    Side,
    SuspicionRecord,
)
from foreroute.report.format import WINDOW, flattened, percentage, reward, scientific, step_time
from foreroute.report.page import Column, Table, TableRow

Measure = Literal["k3", "f2", "differing_share", "differing_tokens_share"]
Key = TypeVar("Key", bound=str)
Value = TypeVar("Value")

ROUTING = {
    "none": "No routing replay: the trainer routes every token itself",
    "R2": "R2: the update replays the experts that the trainer's own recompute pass selected",
    "R3": "R3, rollout routing replay: recompute and update replay the experts that the rollout engine selected",
}
ABOUT_MEASURES = (
    "k3 estimates KL(rollout engine || trainer) on the sampled response tokens. F(2) is the share of response tokens "
    "whose two probabilities differ more than twofold.",
    "A routing decision is the choice of experts for one token in one layer, and differs when the sets do. Tokens "
    "count when at least one of their layers differs.",
    "A dash means never measured.",
)
"""Notes on tables of measures."""


def means(run: Run, measure: Measure) -> dict[Side, float | None]:
    """Average a measure by side, over the steps of `Run.measured`; None: never measured."""
    return {side: _mean(getattr(each, measure) for each in found) for side, found in run.measured.items()}


def rewards(run: Run) -> tuple[float | None, float | None]:
    """Average the reward over the first steps, and over the last ones; None: not recorded."""
    first, last = (
        _mean(step.reward_mean for step in steps if step.reward_mean is not None)
        for steps in (run.steps[:WINDOW], run.steps[-WINDOW:])
    )
    return first, last


def phase_seconds(run: Run) -> dict[str, float]:
    """Average the seconds of each phase over the steps that have times: a killed run has others too."""
    timed = [step.seconds for step in run.steps if step.seconds]
    phases = dict.fromkeys(phase for seconds in timed for phase in seconds)
    return {phase: fmean(seconds.get(phase, 0.0) for seconds in timed) for phase in phases}


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


SUMMARY = (
    Column("Run", "run"),
    Column("Replay", "replay", "words"),
    Column("Differing decisions", "decisions\ndiffering"),
    Column("Differing tokens", "tokens\ndiffering"),
    Column("k3, nats per token", "k3"),
    Column("F(2)", "F(2)"),
    Column(f"Mean reward, first {WINDOW} steps", f"reward,\nfirst {WINDOW}"),
    Column(f"Mean reward, last {WINDOW} steps", f"last {WINDOW}"),
    Column("Steps"),
    Column("Time per step"),
)
SUMMARIZED: dict[Measure, Callable[[float | None], str]] = {
    "differing_share": percentage,
    "differing_tokens_share": percentage,
    "k3": scientific,
    "f2": percentage,
}
"""Measures in columns of the summary, in order, and their looks."""


def summary_table(runs: Sequence[Run], colours: Sequence[str] = ()) -> Table:
    """Two rows for each run, without replay and with it; the run's reward stands where it trains."""
    rows = []
    for index, run in enumerate(runs):
        seconds = phase_seconds(run)
        of_step = sum(seconds.values()) if seconds else None
        own = (*map(reward, rewards(run)), str(len(run.steps)), step_time(of_step))
        measured = [(means(run, measure), shown) for measure, shown in SUMMARIZED.items()]
        for side, replay in zip(SIDES, ("without", "with"), strict=True):
            trains = run.trains_with == side
            measures = [shown(found[side]) for found, shown in measured]
            cells = (run.label, replay, *measures, *(own if trains else ("",) * len(own)))
            rows.append(TableRow(cells=cells, strong=trains, colour=colours[index] if colours else ""))
    return Table(columns=SUMMARY, rows=tuple(rows))


def alarm_table(runs: Sequence[Run], colours: Sequence[str] = ()) -> Table:
    """For each run what the sentinel suspected and its alarms, by steps in a row: what happened and what to do.

    A row has the first suspicion of its likeness, or the value of an alarm that is farthest from its limit.
    """
    rows, names = [], get_args(AlarmName)
    for index, run in enumerate(runs):
        colour = colours[index] if colours else ""
        counted: set[int] = set()  # steps whose dropped tokens a row has said
        suspected = _in_a_row((step.step, _by_likeness(step)) for step in run.steps)
        for likeness, by_step in suspected:
            first, *others = next(iter(by_step.values()))
            more = f"; {len(others)} more at once" if others else ""
            dropped = sum(step.dropped_tokens or 0 for step in run.steps if step.step in by_step.keys() - counted)
            counted.update(by_step)
            left_out = f"; {dropped} response tokens were left out of the updates then" if dropped else ""
            of_rank = f"rank {first.rank}, " if first.rank else ""
            what = f"{likeness}: {of_rank}{first.sentence}{more}{left_out}"
            usual = "" if first.usual is None else f", usual {first.usual:.3g}"
            cells = (run.label, _span(by_step), what, first.advice, f"{first.share:.3g}{usual}")
            rows.append(TableRow(cells=cells, colour=colour, tone="problem"))
        found = _in_a_row((step.step, {alarm.name: alarm for alarm in step.alarms or ()}) for step in run.steps)
        for name, alarms in sorted(found, key=lambda episode: names.index(episode[0])):
            # what the sentinel suspected has rows of its own
            if name == "sentinel" and suspected:
                continue
            worst = max(alarms.values(), key=lambda alarm: abs(alarm.value - alarm.threshold))
            what = f"{WORDS[name][:1].upper()}{WORDS[name][1:]}."
            cells = (run.label, _span(alarms), what, worst.advice, f"{worst.value:.3g}, limit {worst.threshold:.3g}")
            rows.append(TableRow(cells=cells, colour=colour))
    columns = (
        Column("Run"),
        Column("Steps"),
        Column("What happened", content="words"),
        Column("Advice", content="words"),
        Column("Worst value"),
    )
    return Table(columns=columns, rows=tuple(rows))


def _in_a_row(found: Iterable[tuple[int, Mapping[Key, Value]]]) -> list[tuple[Key, dict[int, Value]]]:
    """Group what recorded steps found, by key: each time with what steps in a row found, by step."""
    episodes: list[tuple[Key, dict[int, Value]]] = []
    going: dict[Key, dict[int, Value]] = {}
    for step, here in found:
        # a step that does not find it again ends an episode, whatever comes after
        going = {key: going.get(key, {}) for key in here}
        for key, value in here.items():
            if not going[key]:
                episodes.append((key, going[key]))
            going[key][step] = value
    return episodes


def _span(steps: Collection[int]) -> str:
    """Name the first and the last of some steps."""
    return f"{min(steps)} to {max(steps)}" if len(steps) > 1 else str(min(steps))


def _by_likeness(step: StepRecord) -> dict[str, list[SuspicionRecord]]:
    """Group the suspicions of a step by what they look like, in words."""
    here: dict[str, list[SuspicionRecord]] = {}
    for each in step.suspicions or ():
        here.setdefault(each.looks_like.replace("-", " "), []).append(each)
    return here


def load_table(runs: Sequence[Run]) -> Table:
    """A column for every run that was expert-parallel under a plan; without rows where none was."""
    planned = [(run.label, [execution for _, execution in steps]) for run in runs if (steps := planned_steps(run))]
    return _by_run("Mean of a step", [(label, _loads(steps)) for label, steps in planned])


def facts_table(runs: Sequence[Run]) -> Table:
    """Facts of each run, by topic: routing, device, length, pace; its settings are in `config_table`."""
    return _by_run("", [(run.label, _facts(run)) for run in runs], content="words")


def config_table(runs: Sequence[Run]) -> Table:
    """Every key of every configuration with its value in each run; first and strong those that differ between runs."""
    table = _by_run("Setting", [(run.label, flattened(run.config)) for run in runs], content="words", absent="not set")
    # what differs between runs is what a reader of a comparison looks for
    marked = [TableRow(cells=row.cells, strong=len(set(row.cells[1:])) > 1) for row in table.rows]
    differ = ", those that differ first and in bold" if len(runs) > 1 else ""
    # stable, so that keys keep their order within both parts
    rows = sorted(marked, key=lambda row: not row.strong)
    return Table(columns=table.columns, rows=tuple(rows), folded=f"All settings{differ}")


def _facts(run: Run) -> dict[str, str]:
    """The facts of one run, by topic; topics that were not recorded are left out."""
    steps, num_steps = _span([step.step for step in run.steps]), len(run.steps)
    facts = {
        "routing": ROUTING.get(run.routing, f"Routing {run.routing}"),
        "device": "; ".join(_devices(run)),
        "steps": f"{steps}{' only' * (num_steps == 1)}; measured both ways at {run.num_paired} of {num_steps}",
        "phases of a step": ", ".join(f"{phase} {step_time(value)}" for phase, value in phase_seconds(run).items()),
    }
    return {topic: said for topic, said in facts.items() if said}


def _devices(run: Run) -> list[str]:
    """Every device that steps ran on, in the order of the steps, with the most memory that one of them took."""
    most: dict[str, int] = {}
    for step in run.steps:
        if device := step.device:
            # a processor's name does not say that it is one
            name = f"CPU, {device.name}" if device.type == "cpu" else device.name
            most[name] = max(most.get(name, 0), device.peak_memory_bytes or 0)
    return [f"{name}{f', up to {peak / 1e9:.2f} GB' if peak else ''}" for name, peak in most.items()]


def _by_run(
    heading: str,
    runs: Sequence[tuple[str, Mapping[str, str]]],
    *,
    content: Literal["number", "words"] = "number",
    absent: str = "",
) -> Table:
    """A row for each name and a column for each run, given as its label and its values by name."""
    names = dict.fromkeys(name for _, values in runs for name in values)
    rows = tuple(TableRow(cells=(name, *(values.get(name, absent) for _, values in runs))) for name in names)
    columns = (Column(heading, heading or " "), *(Column(label, label, content) for label, _ in runs))
    return Table(columns=columns, rows=rows)


def planned_steps(run: Run) -> list[tuple[int, ExecutionRecord]]:
    """The steps that ran under a plan, with their numbers."""
    return [(step.step, step.execution) for step in run.steps if step.execution and step.execution.passes]


def _loads(steps: Sequence[ExecutionRecord]) -> dict[str, str]:
    """Effects of plans, by name: means over the steps."""

    def mean(value: Callable[[ExecutionRecord], float]) -> float:
        return sum(map(value, steps)) / len(steps)

    def over_mean(load: Load) -> str:
        return f"{mean(lambda step: step.max_over_mean[load]):.2f}"

    def over_bound(figure: PackingFigure) -> str:
        return f"{mean(lambda step: step.packing[figure] / max(step.packing['bound'], 1)):.3f}"

    def megabytes(*names: str) -> str:
        return f"{mean(lambda step: sum(step.bytes.get(name, 0) for name in names)) / 1e6:.3g} MB"

    packed = {}
    if all(step.packing for step in steps):
        packed["Experts at home over the bound of any packing, by length"] = over_bound("by_length")
        packed["Experts at home over the bound of any packing, by routes"] = over_bound("by_routes")
    if forecast := [step.forecast_memory_bytes for step in steps if step.forecast_memory_bytes]:
        packed["Most memory of a rank in an update, modelled"] = f"{max(forecast) / 1e9:.3g} GB"
    return {
        "Ranks": ", ".join(map(str, sorted({step.ranks for step in steps}))),
        "Busiest rank over mean, experts at home": over_mean("at_home"),
        "Busiest rank over mean, as executed": over_mean("executed"),
        **packed,
        "Replicas": f"{mean(lambda step: step.replicas or 0):.0f}",
        "Weights moved": megabytes("host", "direct"),
        "Gradients moved": megabytes("gradients"),
        "Waited for transfers": step_time(mean(lambda step: step.exposed_transfer_s or 0.0)),
        "Waited for plans": step_time(mean(lambda step: step.exposed_planning_s or 0.0)),
    }

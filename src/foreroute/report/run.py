"""Run folders -> one sentence and one page: what replay and plans did, alarms, curves, and what was run.

Nothing is claimed in the sentence that the runs do not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from foreroute.mismatch.sentinel import WARM_UP
from foreroute.records import Run
from foreroute.records.step_record import ADVICE, SIDES
from foreroute.report.format import WINDOW, percentage, quoted, reward, scientific, span_of
from foreroute.report.page import Column, Page, PageSection, Table, TableRow, write_page
from foreroute.report.run_tables import (
    ABOUT_MEASURES,
    Measure,
    alarm_table,
    config_table,
    facts_table,
    load_table,
    means,
    planned_steps,
    rewards,
    summary_table,
)

KEPT = ("rollouts", "checkpoints")
"""Folders of a run that a diagnosis needs."""
FEWEST_RUNS = 4
"""Runs of each kind. Chance puts all 4 of one above all 4 of the other once in 35 times; with 3, once in 10."""
FOUND: tuple[Measure, Measure] = ("differing_share", "k3")
"""Measures that the finding names of a mismatch."""
SAME = 1.05
"""k3 is called lower where the other is more than this many times it."""

ABOUT_SIDES = (
    "Without replay, the trainer's routers select the experts of every token themselves. With replay, they must use "
    "the experts that the rollout engine selected for the same token; the gate weights still come from the trainer's "
    "own scores. Both are measured on the same rollouts and the same weights, so the two differ in the choice of "
    "experts alone, and neither predicts the reward that a run will reach."
)
RUNS = "Bold is the way that the run trains. The mismatch is averaged over the steps at which both ways were measured."
LOADS = (
    "Experts are spread over ranks, and every cell, one routed layer in one micro-step, lasts as long as its busiest "
    "rank. Replicas and token splits, planned from the known routes, level the cells."
)
LOAD_TABLE = (
    "Busiest rank: its assignments over the mean of all ranks. Weights and gradients are those of replicas. Waiting "
    "is that of the slowest rank."
)
ALARMS = "An alarm warns of a collapse; it looks at means over the last steps."
FIRST = (
    "Mend what the sentinel suspects first, and leave the advice of the other alarms until then: they may follow from "
    "it. Figures of the steps since then are of wrong routes."
)
SUSPECTED = (
    "The sentinel tests the replayed routes of each rollout against those before: how often the trainer's routers "
    "would pick other experts. A row is the routes of one token; sequences, positions (the prompt's too) and steps "
    "count from 0."
)


def run_finding(runs: Sequence[Run]) -> str:
    """Finding of the runs, in one sentence: the load of their ranks, their mismatch, their reward."""
    # of wrong routes, what replay does for mismatch says nothing
    sound = [run for run in runs if not any(step.suspicions for step in run.steps)]
    mismatch = [_mismatch(sound)] if sound else []
    # the most consequential first: a run that learned nothing has no other news
    before = [*_suspected_runs(runs), *_idle(runs), *_load(runs)]
    clauses = [*before, *mismatch, *_reward(runs), *_collapsed(runs), *_well(runs)]
    text = "; ".join(clauses)
    return f"{text[:1].upper()}{text[1:]}."


def _suspected_runs(runs: Sequence[Run]) -> list[str]:
    """Name the runs whose routes look wrong, and like what."""
    clauses = []
    for run in runs:
        steps = [step for step in run.steps if step.suspicions]
        if steps:
            found = (each.looks_like.replace("-", " ") for step in steps for each in step.suspicions or ())
            where = "" if len(runs) == 1 else f" of {run.label}"
            likeness = " and ".join(dict.fromkeys(found))
            clauses.append(f"replayed routes{where} look wrong ({likeness}) from step {steps[0].step} on")
    return clauses


def _well(runs: Sequence[Run]) -> list[str]:
    """Say whether the sentinel judged all runs by their past and suspects nothing."""
    judged = [[step.suspicions for step in run.steps if step.suspicions is not None] for run in runs]
    well = all(len(of) > WARM_UP for of in judged) and not any(map(any, judged))
    return ["the sentinel suspects no replayed route"] if well else []


def _mismatch(runs: Sequence[Run]) -> str:
    paired = [run for run in runs if run.num_paired]
    if not paired:
        return "the mismatch of trainer and rollout engine was not measured both with replay and without at any step"
    shares, k3 = ([[means(run, measure)[side] or 0.0 for side in SIDES] for run in paired] for measure in FOUND)
    native, replayed = zip(*shares, strict=True)
    if not any((*native, *replayed, *(value for pair in k3 for value in pair))):
        return "trainer and rollout engine agree exactly: no route differs and k3 is 0, so replay changes nothing"
    both = "k3 is {1} with replay, {0} without".format(*(span_of(side, scientific) for side in zip(*k3, strict=True)))
    if not any(native) and not any(replayed):
        return f"no route differs even without replay, so replay has none to mend; {both}"
    # replay left routes differing, which says that it does not work: nothing more is claimed
    if any(replayed):
        return f"{_shares(replayed)} of the routing decisions differ with replay, {_shares(native)} without; {both}"
    # one run in which replay does not help is not hidden by the others
    lower = all(high > SAME * low > 0 for high, low in k3)
    factors = span_of([high / low for high, low in k3], _factor) if lower else ""
    return f"replay removes every differing route{f' and lowers k3 {factors} times' if lower else f'; {both}'}"


def _reward(runs: Sequence[Run]) -> list[str]:
    known = [(run, last) for run in runs if (last := rewards(run)[1]) is not None]
    if not known:
        return []
    if len(runs) == 1:
        steps, (first, last) = len(runs[0].steps), rewards(runs[0])
        # both ends would share steps
        if steps < 2 * WINDOW:
            return [f"the mean reward is {reward(last)} over the last {min(steps, WINDOW)} steps"]
        return [f"the mean reward goes from {reward(first)} to {reward(last)}"]
    with_, without = ([last for run, last in known if run.trains_with == side] for side in ("replayed", "native"))
    # rewards are compared between the two kinds of runs alone
    if not with_ or not without or any(run.routing == "R2" for run, _ in known):  # R2 is neither
        return [f"their mean reward over the last {WINDOW} steps is {span_of((*with_, *without), reward)}, by run"]
    # spans and no means: a reader sees how far runs of one kind lie apart
    figures = f"{span_of(with_, reward)} with replay, {span_of(without, reward)} without"
    if min(len(with_), len(without)) < FEWEST_RUNS:
        few = "the two rewards" if len(known) == 2 else "the rewards of so few runs"
        return [f"{few}, {figures}, are not told apart"]
    if min(with_) > max(without) or max(with_) < min(without):
        higher = "with" if min(with_) > max(without) else "without"
        return [f"every run {higher} replay ends with more reward than every other: {figures}"]
    return [f"the rewards, {figures}, are not told apart"]


def _collapsed(runs: Sequence[Run]) -> list[str]:
    """Name the runs that had the alarm that no figure above would show."""
    names = [
        run.label for run in runs if any(alarm.name == "collapse" for step in run.steps for alarm in step.alarms or ())
    ]
    return [f"the reward or the loss collapsed in {', '.join(names)}"] if names else []


def _idle(runs: Sequence[Run]) -> list[str]:
    """Name the runs that have learned nothing, though all went well: a group of equal rewards has no advantage."""
    names = [run.label for run in runs if run.steps and all(step.informative_share == 0 for step in run.steps)]
    which = "no step" if len(names) == len(runs) else f"no step of {', '.join(names)}"
    return [f"{which} changed the weights, because all responses of every prompt got one reward"] if names else []


def _load(runs: Sequence[Run]) -> list[str]:
    """The load of the busiest rank over the mean, on average over the steps of each run with plans."""
    at_home, executed = [], []
    for run in runs:
        if loads := [execution.max_over_mean for _, execution in planned_steps(run)]:
            at_home.append(fmean(each["at_home"] for each in loads))
            executed.append(fmean(each["executed"] for each in loads))
    if not executed:
        return []
    before, after = (span_of(loads, "{:.2f}".format) for loads in (at_home, executed))
    # one run in which the plan does not help is not hidden by the others
    if all(now < then for then, now in zip(at_home, executed, strict=True)):
        return [f"plans lower the busiest rank from {before} to {after} times the mean"]
    return [f"the busiest rank has {after} times the mean, {before} with experts at home"]


def _factor(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _shares(shares: Iterable[float | None]) -> str:
    return span_of(shares, percentage)


def write_report(runs: Sequence[Run], target: Path) -> Path:
    """Write the report of one run, or the comparison of several; raises `InputError` as `page.write_page`."""
    return write_page(target, lambda: _page(runs))


def _page(runs: Sequence[Run]) -> Page:
    from foreroute.report.run_plots import rank_load_plots, run_key, run_plots

    names = tuple(run_key(runs, index) for index in range(len(runs)))
    colours = [key.colour or "" for key in names]
    looks_wrong = any(step.suspicions for run in runs for step in run.steps)
    sections = [
        *_alarms(runs, colours),
        PageSection(
            heading="Mismatch and reward",
            texts=(ABOUT_SIDES,),
            tables=(summary_table(runs, colours),),
            notes=(RUNS, *ABOUT_MEASURES, *_notes(runs)),
        ),
    ]
    if (loads := load_table(runs)).rows:
        plots = tuple(rank_load_plots(runs))
        sections.append(
            PageSection(heading="Load of the ranks", texts=(LOADS,), plots=plots, tables=(loads,), notes=(LOAD_TABLE,))
        )
    sections += [
        PageSection(heading="Over the run", plots=tuple(run_plots(runs))),
        PageSection(heading="What was run", keys=names, tables=(facts_table(runs), config_table(runs))),
    ]
    # a page that is read elsewhere cannot run them, but says what was kept
    commands = [command for run in runs for command in commands_of(run)]
    return Page(
        command="foreroute report",
        title=f"Run {runs[0].label}" if len(runs) == 1 else f"Comparison of {len(runs)} runs",
        finding=run_finding(runs),
        tone="problem" if looks_wrong else "",
        sections=(*sections, *further(commands)),
    )


def commands_of(run: Run) -> list[tuple[str, str]]:
    """Commands that diagnose a run, with what each does, where it kept a rollout of a checkpoint's weights."""
    # a rollout is compared with the weights that made it, which are those of a checkpoint or gone
    rollouts, checkpoints = ({path.name for path in (run.folder / name).glob("step-*")} for name in KEPT)
    if not rollouts & checkpoints:
        return []
    page = run.folder / "doctor.html"
    return [(f"Diagnose {run.label}", f"foreroute doctor --model {quoted(run.folder)} --output {quoted(page)}")]


def further(commands: Sequence[tuple[str, str]]) -> list[PageSection]:
    """A section of commands, each with what it does, to be run where the page was made; none without commands."""
    return [PageSection(heading="Further", tables=(command_table(commands),))] if commands else []


def command_table(commands: Sequence[tuple[str, str]]) -> Table:
    """Tabulate what each command does, and the command."""
    columns = (Column("What it does"), Column("Command", content="code"))
    return Table(title="Next", columns=columns, rows=tuple(TableRow(cells=command) for command in commands))


def _alarms(runs: Sequence[Run], colours: Sequence[str]) -> list[PageSection]:
    """Nothing where no run recorded whether alarms were on."""
    watched = [run.label for run in runs if any(step.alarms is not None for step in run.steps)]
    # a section without a table would read as "no alarm"
    if not watched:
        return []
    judged = sum(max(sum(step.suspicions is not None for step in run.steps) - WARM_UP, 0) for run in runs)
    suspected, alarmed = (
        [run for run in runs if any(getattr(step, name) for step in run.steps)] for name in ("suspicions", "alarms")
    )
    if suspected or alarmed:
        # the next command stands where a reader has the question that it answers
        commands = [command for run in runs if run in suspected + alarmed for command in commands_of(run)]
        tables = tuple(table for table in (alarm_table(runs, colours), command_table(commands)) if table.rows)
        texts, notes = ((FIRST,), (SUSPECTED, ADVICE["sentinel"])) if suspected else ((), (ALARMS,))
        return [PageSection(heading="Alarms", texts=texts, tables=tables, notes=notes)]
    of = f" in {', '.join(watched)}; the other runs did not record it" if len(watched) < len(runs) else ""
    well = f" The sentinel tested the replayed routes of {judged} steps, and suspects none." if judged else ""
    return [PageSection(heading="Alarms", texts=(f"No alarm was on{of}.{well}",))]


def _notes(runs: Sequence[Run]) -> list[str]:
    """Notes on each run for readers of the tables."""
    notes = [f"{run.label}: {note}" for run in runs for note in run.notes]
    for run in runs:
        if not any(run.measured.values()):
            notes.append(f"{run.label}: the mismatch of trainer and rollout engine was not recorded.")
        elif not run.num_paired:
            notes.append(
                f"{run.label}: at no step was the mismatch measured both without and with replay, "
                "so what it shows is the average over the steps that were measured one way."
            )
        if (steps := len(run.steps)) < 2 * WINDOW:
            notes.append(f"{run.label}: has {steps} steps, so its first and last {WINDOW} steps overlap.")
    return notes

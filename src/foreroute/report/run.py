"""Run folders -> one page: what replay and plans did, alarms, curves, and what was run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foreroute.mismatch.sentinel import WARM_UP
from foreroute.records import Run
from foreroute.records.step_record import ADVICE
from foreroute.report.finding import run_finding
from foreroute.report.format import WINDOW, quoted
from foreroute.report.page import Column, Page, PageSection, Table, TableRow, write_page
from foreroute.report.run_tables import (
    ABOUT_MEASURES,
    SummaryRow,
    alarm_table,
    config_table,
    facts_table,
    load_table,
    summary_rows,
    summary_table,
    suspicion_table,
)

KEPT = ("rollouts", "checkpoints")
"""Folders of a run that a diagnosis needs."""

SIDES = (
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
    "would pick other experts. k3 without replay compares log-probs, whatever routes were recorded. A row is the "
    "routes of one token; sequences, positions (the prompt's too) and steps count from 0."
)


def write_report(runs: Sequence[Run], target: Path) -> Path:
    """Write the report of one run, or the comparison of several; raises `InputError` as `page.write_page`."""
    return write_page(target, lambda: _page(runs))


def _page(runs: Sequence[Run]) -> Page:
    from foreroute.report.run_plots import rank_load_plots, run_key, run_plots

    rows = summary_rows(runs)
    names = tuple(run_key(runs, place) for place in range(len(runs)))
    colours = [key.colour or "" for key in names]
    alarms, looks_wrong = _alarms(runs, colours), any(step.suspicions for run in runs for step in run.steps)
    sections = [
        *(alarms if looks_wrong else []),
        PageSection(
            heading="Mismatch and reward",
            texts=(SIDES,),
            tables=(summary_table(rows, colours),),
            notes=(RUNS, *ABOUT_MEASURES, *_notes(runs, rows)),
        ),
        *([] if looks_wrong else alarms),
    ]
    if (loads := load_table(runs)).rows:
        plots = tuple(rank_load_plots(runs))
        sections.append(
            PageSection(heading="Load of the ranks", texts=(LOADS,), plots=plots, tables=(loads,), notes=(LOAD_TABLE,))
        )
    sections += [
        PageSection(heading="Over the run", plots=tuple(run_plots(runs))),
        PageSection(heading="What was run", keys=names, tables=(facts_table(runs, rows), config_table(runs))),
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
    columns = (Column("What it does"), Column("Command", kind="code"))
    table = Table(columns=columns, rows=tuple(TableRow(cells=command) for command in commands))
    return [PageSection(heading="Further", tables=(table,))] if commands else []


def _alarms(runs: Sequence[Run], colours: Sequence[str]) -> list[PageSection]:
    """Nothing where no run recorded whether alarms were on."""
    watched = [run.label for run in runs if any(step.alarms is not None for step in run.steps)]
    # a section without a table would read as "no alarm"
    if not watched:
        return []
    judged = sum(max(sum(step.suspicions is not None for step in run.steps) - WARM_UP, 0) for run in runs)
    suspected, others = suspicion_table(runs, colours), alarm_table(runs, colours)
    if suspected.rows:
        first = (FIRST,) if others.rows else ()
        tables, notes = [suspected, others], (SUSPECTED, ADVICE["sentinel"])
        return [
            PageSection(heading="Alarms", texts=first, tables=tuple(each for each in tables if each.rows), notes=notes)
        ]
    if others.rows:
        return [PageSection(heading="Alarms", tables=(others,), notes=(ALARMS,))]
    of = f" in {', '.join(watched)}; the other runs did not record it" if len(watched) < len(runs) else ""
    well = f" The sentinel tested the replayed routes of {judged} steps, and suspects none." if judged else ""
    return [PageSection(heading="Alarms", texts=(f"No alarm was on{of}.{well}",))]


def _notes(runs: Sequence[Run], rows: Sequence[SummaryRow]) -> list[str]:
    """Notes on each run for readers of the tables."""
    notes = [f"{run.label}: {note}" for run in runs for note in run.notes]
    for row in rows:
        if not row.paired_steps and set(row.k3.values()) == {None}:
            notes.append(f"{row.run}: the mismatch of trainer and rollout engine was not recorded.")
        elif not row.paired_steps:
            notes.append(
                f"{row.run}: at no step was the mismatch measured both without and with replay, "
                "so what it shows is the average over the steps that were measured one way."
            )
        if row.steps < 2 * WINDOW:
            notes.append(f"{row.run}: has {row.steps} steps, so its first and last {WINDOW} steps overlap.")
    return notes

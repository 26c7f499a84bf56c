"""`foreroute doctor`: examine, print, and write the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from foreroute.cli.doctor_inputs import (
    DoctorInputs,
    EngineOutput,
    read_array,
    read_engine,
    read_trainer,
    with_last_rollout,
)
from foreroute.cli.terminal import CommandProgress, Console, shown_table, working
from foreroute.doctor import Diagnosis, Evidence, Severity, TrainerPass, diagnose
from foreroute.errors import printable
from foreroute.report import check_page, measure_table, write_diagnosis
from foreroute.report.format import quoted
from foreroute.trace import RoutingTrace, load

STYLES = {Severity.FINE: "green", Severity.NOTE: "blue", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}


def run_doctor(
    inputs: DoctorInputs,
    output: Path | None,
    *,
    temperature: float | None,
    weight_version: int | None,
    max_sequences: int,
) -> Severity:
    """Print the diagnosis, write the page if asked, and return how bad it is.

    Args:
        inputs: what to examine.
        output: the page.
        temperature: that the engine divided its logits by; None takes the configuration's, or 1.
        weight_version: that the trainer is at; None takes that of the checkpoint, where there is one.
        max_sequences: how many of the sequences to run.

    Raises:
        InputError: for everything that a user can mend.
    """
    console = Console()
    if output is not None:
        check_page(output)
    inputs = with_last_rollout(inputs)
    with working("reading the engine's side", console):
        engine = read_engine(inputs, max_sequences)
    if inputs.model is not None:
        with working("loading the model", console) as work:
            evidence, name = _examined(inputs, engine, temperature, weight_version, work)
    else:
        with working("reading the trainer's side", console):
            evidence, name = _given(inputs, engine, weight_version), "none; the trainer's passes were given"
    with working("comparing", console):
        diagnosis = diagnose(evidence, _facts(name, engine.trace))
    _print(console, diagnosis)
    commands = _commands(inputs)
    for what, command in commands:
        console.print(f"\n{what}:\n{printable(command)}", soft_wrap=True, highlight=False, markup=False)
    if output is not None:
        with working("drawing the page", console):
            page = write_diagnosis(diagnosis, output, commands)
        console.print(f"page  {page}", soft_wrap=True, highlight=False)
    return diagnosis.worst


def _examined(
    inputs: DoctorInputs,
    engine: EngineOutput,
    temperature: float | None,
    weight_version: int | None,
    work: CommandProgress,
) -> tuple[Evidence, str]:
    from foreroute.doctor.examine import examine

    trainer = read_trainer(inputs, engine.trace)
    work.begin("examining the model: quick checks, then passes over the sequences")
    evidence = examine(
        trainer.model,
        engine.generation,
        trace=engine.trace,
        temperature=trainer.temperature if temperature is None else temperature,
        expected_version=trainer.expected_version(engine.trace) if weight_version is None else weight_version,
        random_weights=not trainer.has_weights,
    )
    evidence = replace(evidence, before_step_0=trainer.before_step_0, checkpoints=trainer.checkpoints)
    weights = f", {trainer.checkpoint}" if trainer.checkpoint else ""
    return evidence, f"{inputs.model}{weights} ({type(trainer.model).__name__})"


def _given(inputs: DoctorInputs, engine: EngineOutput, weight_version: int | None) -> Evidence:
    """Read the evidence of passes that the user ran."""
    executed = load(inputs.trainer_trace) if inputs.trainer_trace else None
    logprobs_R = read_array(inputs.trainer_logprobs, "f") if inputs.trainer_logprobs else None
    replayed = TrainerPass(None, read_array(inputs.replayed_logprobs, "f")) if inputs.replayed_logprobs else None
    return Evidence(
        engine=engine.trace,
        engine_logprobs_R=engine.logprobs_R,
        native=TrainerPass(executed, logprobs_R),
        replayed=replayed,
        expected_version=weight_version,
    )


def _facts(model: str, trace: RoutingTrace | None) -> dict[str, str]:
    facts = {"model": printable(model)}
    if trace is not None:
        spec = trace.spec
        versions = ", ".join(str(version) for version in trace.versions if version >= 0) or "unknown"
        facts["trace"] = (
            f"{len(trace)} sequences, {trace.num_rows} rows, {spec.num_layers} layers, top-{spec.top_k} of "
            f"{spec.num_experts} experts, weights of version {versions}"
        )
    return facts


def _commands(inputs: DoctorInputs) -> list[tuple[str, str]]:
    """What else looks at the same files: the page of the run, and the table of two traces."""
    commands = []
    if inputs.model is not None and (inputs.model / "metrics.jsonl").exists():
        commands.append(("The page of this run", f"foreroute report {quoted(inputs.model)}"))
    if inputs.trainer_trace is not None and inputs.trace is not None:
        traces = f"{quoted(inputs.trainer_trace)} {quoted(inputs.trace)}"
        commands.append(("The two traces by layer and position", f"foreroute diff {traces}"))
    return commands


def _print(console: Console, diagnosis: Diagnosis) -> None:
    style = STYLES[diagnosis.worst]
    console.print(f"[{style}]{escape(diagnosis.headline)}[/]\n", highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in sorted(diagnosis.findings, key=lambda finding: -finding.severity):
        word = f"[{STYLES[finding.severity]}]{finding.severity.name.lower()}[/]"
        advice = f"\n[dim]{escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(word, finding.topic, escape(finding.sentence) + advice)
    console.print(table)
    measures = measure_table(diagnosis.measures)
    if measures.rows:
        console.print(shown_table(measures))

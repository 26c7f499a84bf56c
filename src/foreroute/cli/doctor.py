"""`foreroute doctor`: examine, print, and write the page."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from foreroute.cli.doctor_inputs import DoctorInputs, Engine, read_array, read_engine, read_model
from foreroute.cli.terminal import Console
from foreroute.conformance.diagnosis import Diagnosis, Evidence, Severity, TrainerPass
from foreroute.conformance.doctor import diagnose
from foreroute.report import check_page, measure_rows, write_diagnosis
from foreroute.trace import RoutingTrace, load

STYLES = {Severity.FINE: "green", Severity.NOTE: "blue", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}


def run_doctor(
    inputs: DoctorInputs,
    output: Path | None,
    *,
    temperature: float,
    weight_version: int | None,
    max_sequences: int,
) -> Severity:
    """Print the diagnosis, write the page if asked, and return how bad it is."""
    console = Console()
    if output is not None:
        check_page(output)
    engine = read_engine(inputs, max_sequences)
    if inputs.model is not None:
        with console.status("examining the model: quick checks, then passes over the sequences"):
            evidence, name = _examined(inputs, engine, temperature, weight_version)
    else:
        evidence, name = _given(inputs, engine, weight_version), "none; the trainer's passes were given"
    diagnosis = diagnose(evidence, _facts(name, engine.trace))
    _print(console, diagnosis)
    if output is not None:
        console.print(f"page  {write_diagnosis(diagnosis, output)}", soft_wrap=True, highlight=False)
    return diagnosis.worst


def _examined(
    inputs: DoctorInputs, engine: Engine, temperature: float, weight_version: int | None
) -> tuple[Evidence, str]:
    from foreroute.conformance.examine import examine

    assert inputs.model is not None, "called without a model"
    model, has_weights = read_model(inputs.model, inputs.checkpoint)
    evidence = examine(
        model,
        engine.generation,
        trace=engine.trace,
        temperature=temperature,
        expected_version=weight_version,
        random_weights=not has_weights,
    )
    return evidence, f"{inputs.model} ({type(model).__name__})"


def _given(inputs: DoctorInputs, engine: Engine, weight_version: int | None) -> Evidence:
    """Evidence of passes that the user ran."""
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
    facts = {"model": model}
    if trace is not None:
        spec = trace.spec
        facts["trace"] = (
            f"{len(trace)} sequences, {trace.num_rows} rows, {spec.num_layers} layers, top-{spec.top_k} of "
            f"{spec.num_experts} experts, weight versions {', '.join(map(str, trace.versions)) or 'none'}"
        )
    return facts


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
    rows = measure_rows(diagnosis.measures)
    if rows:
        measures = Table(title="\nMeasures", title_justify="left")
        for heading in ("compared", "k3", "F(2)", "cells differing", "tokens differing"):
            measures.add_column(heading, justify="left" if heading == "compared" else "right")
        for row in rows:
            measures.add_row(row.name, row.k3, row.f2, row.cells, row.tokens)
        console.print(measures)

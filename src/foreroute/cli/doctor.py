"""`foreroute doctor`: read both sides, examine, print, and write the page."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreroute.capture.generation import Generation, is_generation, load_generation
from foreroute.cli.exit_codes import refuse_unused
from foreroute.cli.terminal import Console, Work, shown_table, working
from foreroute.doctor import Evidence, Severity, diagnose
from foreroute.doctor.evidence import TrainerPass
from foreroute.errors import InputError, ReplayError, RunFolderError, printable
from foreroute.files.regular import parse_json, read_text
from foreroute.report import write_diagnosis
from foreroute.report.diagnosis import finding_table, measure_table
from foreroute.report.format import quoted
from foreroute.report.page import check_page
from foreroute.trace import RoutingTrace, load

if TYPE_CHECKING:
    from foreroute.train import TrainConfig

MOST_SEQUENCES = 64
"""Sequences that a model runs where nothing else is asked for."""


def run_doctor(
    model: Path | None,
    rollout: Path | None = None,
    trainer: Path | None = None,
    replayed: Path | None = None,
    *,
    temperature: float | None = None,
    weight_version: int | None = None,
    max_sequences: int | None = None,
    explain: bool = False,
    output: Path | None = None,
) -> Severity:
    """Print the diagnosis, write the page if asked, and return how bad it is; `foreroute.cli.main` has the options."""
    console = Console()
    if output is not None:
        check_page(output)
    # what cannot be answered is refused before minutes of passes
    if model is not None and (trainer or replayed):
        raise InputError("--model computes the trainer's routes and log-probs; do not give --trainer or --replayed too")
    if model is None and (trainer is None or rollout is None):
        raise InputError("there are no two sides to compare: give --rollout, and --model or --trainer")
    of_passes = {"--temperature": temperature, "--max-sequences": max_sequences, "--explain": explain or None}
    if model is None:
        refuse_unused(of_passes, "without --model, whose passes it is about")
    elif rollout is None and (rollout := _last_rollout(model)) is None:
        refuse_unused({**of_passes, "--weight-version": weight_version}, "without --rollout, as nothing is compared")
    with working("reading the rollout", console):
        # a model runs every sequence that is read; given passes cost nothing
        most = None if model is None else max_sequences or MOST_SEQUENCES
        trace, generation = (None, None) if rollout is None else _read(rollout, most)
    if explain and generation is None:
        raise InputError("--explain needs the engine's log-probs, and there are none; give --rollout a generation")
    if model is not None:
        with working("loading the model", console) as work:
            evidence, facts = _examined(model, trace, generation, temperature, weight_version, explain, work)
    else:
        assert trainer is not None, "checked above"
        with working("reading the trainer's passes", console):
            executed, own = _read(trainer)
            evidence = Evidence(
                engine=trace,
                engine_logprobs_R=None if generation is None else generation.logprobs_R,
                response_lengths_S=None if generation is None else generation.response_lengths,
                prompt_lengths_S=None if generation is None else generation.prompt_lengths,
                native=TrainerPass(executed, None if own is None else own.logprobs_R),
                replayed=None if replayed is None else _replayed(replayed, trace),
                expected_version=weight_version,
            )
        facts = {"model": "none; the trainer's passes were given"}
    with working("comparing", console):
        diagnosis = diagnose(evidence, facts | _facts(trace))
    for name in ("examined", "not explained"):
        if name in facts:
            console.print(f"{name}: {facts[name]}", highlight=False, markup=False)
    console.print(f"{diagnosis.headline}\n", style="bold", highlight=False, markup=False)
    if diagnosis.worst is Severity.WARNING:
        console.print("A warning ends with exit code 0, a problem with 1.\n", highlight=False, markup=False)
    console.print(shown_table(finding_table(diagnosis)))
    if (measures := measure_table(diagnosis.measures)).rows:
        console.print(shown_table(measures))
    commands = []
    if model is not None and (model / "metrics.jsonl").exists():
        commands.append(("The page of this run", f"foreroute report {quoted(model)}"))
    # `foreroute diff` reads traces, not generations
    if rollout is not None and trainer is not None and not any(map(is_generation, (rollout, trainer))):
        commands.append(("The two traces by layer and position", f"foreroute diff {quoted(trainer)} {quoted(rollout)}"))
    for what, command in commands:
        console.print(f"\n{what}:\n{printable(command)}", soft_wrap=True, highlight=False, markup=False)
    if output is not None:
        with working("drawing the page", console):
            page = write_diagnosis(diagnosis, output, commands)
        console.print(f"page  {page}", soft_wrap=True, highlight=False)
    return diagnosis.worst


def _read(path: Path, most: int | None = None) -> tuple[RoutingTrace, Generation | None]:
    """Read one side, the first sequences of it: its routes, and a generation where it has log-probs too."""
    side = load_generation(path) if is_generation(path) else load(path)
    side = side if most is None else side.select(np.arange(min(len(side), most)))
    return (side.trace, side) if isinstance(side, Generation) else (side, None)


def _replayed(path: Path, rollout: RoutingTrace | None) -> TrainerPass:
    """Read the pass on the engine's routes, whose log-probs alone tell something."""
    side = load_generation(path)
    if rollout is None or not np.array_equal(side.trace.token_ids_N, rollout.token_ids_N):
        raise InputError(f"{path} holds other tokens than the rollout; give the trainer's pass over that rollout")
    return TrainerPass(None, side.logprobs_R)


def _examined(
    path: Path,
    trace: RoutingTrace | None,
    generation: Generation | None,
    temperature: float | None,
    weight_version: int | None,
    explains: bool,
    work: Work,
) -> tuple[Evidence, dict[str, str]]:
    """Load a model, of a run or of anybody, and examine it; returns the evidence, and facts for people."""
    from foreroute.adapters.hf.loading import load_local
    from foreroute.doctor.examine import examine

    facts, found, step, has_weights = {}, f"{path}", None, True
    if (run := _run_of(path)) is not None:
        model, checkpoint, step, config = _of_run(run, trace)
        found, temperature = f"{path}, {checkpoint}", config.rollout.temperature if temperature is None else temperature
        facts = {"examined": f"step {step} of {config.rl.steps}{'' if step else ', before training'}"}
    else:
        model, has_weights = load_local(path)
    # a trace that says no version is not called stale for it
    if weight_version is None and trace is not None and any(version >= 0 for version in trace.versions):
        weight_version = step
    work.begin("examining the model: quick checks, then passes over the sequences")
    temperature = 1.0 if temperature is None else temperature
    evidence = examine(
        model,
        generation,
        trace=trace,
        temperature=temperature,
        expected_version=weight_version,
        random_weights=not has_weights,
    )
    # where nothing could be replayed, the diagnosis says why
    if explains and generation is not None and evidence.engine is not None and evidence.replayed is not None:
        from foreroute.doctor.explain import explain

        work.begin("explaining the gap: two passes with gradients")
        of_engine = replace(generation, trace=evidence.engine)
        try:
            evidence = replace(evidence, attribution=explain(model, of_engine, evidence, temperature=temperature))
        except ReplayError as error:  # what was found so far is worth more
            facts["not explained"] = str(error)
    return evidence, facts | {"model": printable(f"{found} ({type(model).__name__})")}


def _run_of(path: Path) -> Path | None:
    """Return the folder of a run, which may be named by its config.json; None where it is another model."""
    folder = path.parent if path.name == "config.json" else path
    # os.path, as a name that is too long raises in pathlib
    is_run = os.path.exists(folder / "metrics.jsonl") or os.path.isdir(folder / "checkpoints")
    return folder if is_run else None


def _last_rollout(model: Path) -> Path | None:
    """Return the last rollout that a run kept at a checkpoint's step; None where it kept none, or is no run."""
    folder = _run_of(model)
    if folder is None:
        return None
    from foreroute.train.folder import files_by_step

    rollouts, checkpoints = (dict(files_by_step(folder / name)) for name in ("rollouts", "checkpoints"))
    # a rollout whose weights are gone can be compared with nothing
    both = rollouts.keys() & checkpoints.keys()
    return rollouts[max(both)] if both else None


def _of_run(folder: Path, trace: RoutingTrace | None) -> tuple[Any, Path, int, TrainConfig]:
    """Load the model of a run at the checkpoint that a trace was recorded under, or else at the last one.

    Returns the model, its checkpoint, the step that this is of, and the configuration of the run.
    """
    from foreroute.train import parse_config
    from foreroute.train.folder import as_run_folder_error, files_by_step, load_checkpoint
    from foreroute.train.policy import make_model
    from foreroute.train.prompts import make_task

    held = dict(files_by_step(folder / "checkpoints"))
    if not held:
        raise RunFolderError(f"{folder} holds no checkpoints, so there are no weights to examine")
    # other weights would show a mismatch that the run never had
    known = [version for version in trace.versions if version >= 0] if trace is not None else []
    step = known[-1] if known else max(held)
    if step not in held:
        raise RunFolderError(
            f"{folder} has no checkpoint of weight version {step}, under which the trace was recorded; it has those "
            f"of {', '.join(map(str, sorted(held)))}. Give the rollout of one of these"
        )
    stored = folder / "config.json"
    values = parse_json(read_text(stored, RunFolderError), RunFolderError, name=str(stored))
    config = parse_config(values, source=str(stored))
    # every weight is overwritten from the checkpoint, so any seed will do
    model = make_model(config.model, make_task(config), seed=0)
    state = load_checkpoint(held[step])
    with as_run_folder_error(f"checkpoint {held[step]}"):
        model.load_state_dict(state["model"])
    return model, held[step], step, config


def _facts(trace: RoutingTrace | None) -> dict[str, str]:
    """Say what the rollout holds."""
    if trace is None:
        return {}
    spec = trace.spec
    versions = ", ".join(str(version) for version in trace.versions if version >= 0) or "unknown"
    sizes = f"{len(trace)} sequences, {trace.num_rows} rows, {spec.num_layers} layers, {spec.routing} experts"
    return {"trace": f"{sizes}, weights of version {versions}"}

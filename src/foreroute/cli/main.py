"""`foreroute demo | train | inspect | validate | convert | diff | doctor | report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import foreroute
from foreroute.errors import AttachError, ForerouteError, InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Record the routes at rollout. Replay them in training. Balance the experts before the step runs.",
)


def main() -> None:
    """Run the command line; a user's error becomes one message and exit code 2."""
    try:
        app()
    except (InputError, AttachError) as error:
        _fail(error, 2)
    except ForerouteError as error:
        _fail(error, 1)


def _fail(error: ForerouteError, code: int) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error[/]: {_escaped(str(error))}", highlight=False)
    sys.exit(code)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foreroute {foreroute.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Where to put the runs; a new folder below runs/demo by default.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="RL steps of each run.")] = None,
    precision: Annotated[str, typer.Option(help="Of the rollout engine: bfloat16, fp8 or float32.")] = "bfloat16",
    engine: Annotated[
        str, typer.Option(help="Rollout engine: embedded, or vllm (make vllm-env installs it beside).")
    ] = "embedded",
) -> None:
    """Train a tiny MoE model without and with replay, and compare what was measured."""
    from foreroute.cli.demo import run_demo

    run_demo(folder, steps=steps, precision=precision, engine=engine)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    folder: Annotated[Path | None, typer.Option(help="The run's folder; runs/NAME by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")] = False,
) -> None:
    """Train from a configuration; Ctrl-C saves a checkpoint first."""
    from foreroute.cli.train import run_training

    run_training(config, folder, resume=resume)


@app.command()
def inspect(trace: Annotated[Path, typer.Argument(help="A trace file.")]) -> None:
    """Show what a routing trace holds."""
    from foreroute.cli.inspect import print_trace

    print_trace(trace)


@app.command()
def doctor(
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder, its config.json, or a TOML of foreroute train.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint of that TOML's run.")] = None,
    generation: Annotated[Path | None, typer.Option(help="Trace and log-probs, by capture.save_generation.")] = None,
    trace: Annotated[Path | None, typer.Option(help="The engine's trace.")] = None,
    logprobs: Annotated[Path | None, typer.Option(help="The engine's, of the response tokens: .npy, floats.")] = None,
    prompt_lengths: Annotated[Path | None, typer.Option(help="Tokens per prompt: .npy, integers.")] = None,
    trainer_trace: Annotated[Path | None, typer.Option(help="The trainer's own routes, without a model.")] = None,
    trainer_logprobs: Annotated[Path | None, typer.Option(help="Without replay: .npy, without a model.")] = None,
    replayed_logprobs: Annotated[Path | None, typer.Option(help="With replay: .npy, without a model.")] = None,
    temperature: Annotated[float, typer.Option(min=1e-3, help="That the engine divided its logits by.")] = 1.0,
    weight_version: Annotated[int | None, typer.Option(help="That the trainer is at.")] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="How many of the sequences to run.")] = 64,
    output: Annotated[Path | None, typer.Option(help="Also write an HTML page.")] = None,
) -> None:
    """Say whether replay is wired, how far trainer and engine are apart, why, and whether R3 helps.

    Exit code 1 when a problem was found.
    """
    from foreroute.cli.doctor import run_doctor
    from foreroute.cli.doctor_inputs import DoctorInputs
    from foreroute.conformance.diagnosis import Severity

    inputs = DoctorInputs(
        model=model,
        checkpoint=checkpoint,
        generation=generation,
        trace=trace,
        logprobs=logprobs,
        prompt_lengths=prompt_lengths,
        trainer_trace=trainer_trace,
        trainer_logprobs=trainer_logprobs,
        replayed_logprobs=replayed_logprobs,
    )
    worst = run_doctor(
        inputs, output, temperature=temperature, weight_version=weight_version, max_sequences=max_sequences
    )
    if worst is Severity.PROBLEM:
        raise typer.Exit(1)


@app.command()
def validate(traces: Annotated[list[Path], typer.Argument(help="Trace files.")]) -> None:
    """Check trace files: readable, undamaged, and routes that a router can have taken."""
    from foreroute.cli.inspect import validate_traces

    if not validate_traces(traces):
        raise typer.Exit(2)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A trace file, or what an engine or framework wrote.")],
    target: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
    to: Annotated[str, typer.Option(help="packed, raw or planes; or npy, raw-int32, nemo-rl, prime-rl, skyrl.")] = (
        "packed"
    ),
    model: Annotated[
        Path | None, typer.Option(help="A trace of the same model, or its config.json; needed for engine output.")
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="JSON list of token lists, where the source has none.")] = None,
    start: Annotated[int | None, typer.Option(help="Position of the first row, if not 0.")] = None,
    weight_version: Annotated[int, typer.Option(help="Of the weights that computed the routes; -1 unknown.")] = -1,
    engine: Annotated[str, typer.Option(help="vllm, sglang, ... where the source does not tell.")] = "",
    engine_version: Annotated[str, typer.Option(help="Such as 0.5.12.")] = "",
) -> None:
    """Turn engine output into a trace, a trace into another codec, or a trace into another framework's form."""
    from foreroute.cli.convert import Origin, convert_file

    convert_file(source, target, to, Origin(model, tokens, start, weight_version, engine, engine_version))


@app.command()
def diff(
    reference: Annotated[Path, typer.Argument(help="A trace file, say of the trainer's own routes.")],
    other: Annotated[Path, typer.Argument(help="A trace file of the same tokens, say of the engine's routes.")],
) -> None:
    """Compare two traces and name what sets them apart; exit code 1 when it is a defect."""
    from foreroute.cli.diff import print_difference

    if not print_difference(reference, other):
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of one or more runs.")],
    output: Annotated[Path | None, typer.Option(help="The page; report.html in the first run by default.")] = None,
) -> None:
    """Write one HTML page about a run, or comparing several."""
    from foreroute.report import write_report

    typer.echo(write_report(runs, output or runs[0] / "report.html"))


if __name__ == "__main__":
    main()

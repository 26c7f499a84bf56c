"""The verbs of `foreroute`, and the options and arguments of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import foreroute
from foreroute.cli.exit_codes import run
from foreroute.cli.terminal import Console

# verbs import what they need when they run: `--help` must not load torch
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Record the routes at rollout. Replay them in training. Balance the experts before the step runs.",
    epilog="Documentation: https://github.com/foreroute/foreroute/tree/main/docs",
)


def main() -> None:
    """Run the command line and exit; `foreroute.cli.exit_codes` has the exit codes."""
    run(lambda: app(standalone_mode=False))  # Typer would print what was typed as it stands


def _print_version(wanted: bool) -> None:
    if wanted:
        Console().print(f"foreroute {foreroute.__version__}", highlight=False)
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
    folder: Annotated[Path | None, typer.Option(help="Folder of the runs; a new one in runs/demo by default.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="RL steps of each run; 100 by default.")] = None,
    vllm: Annotated[
        Path | None, typer.Option(help="Sample with vLLM: Python of its environment (docs/capture.md).")
    ] = None,
) -> None:
    """Train a tiny MoE without and with replay. A page compares both runs."""
    from foreroute.cli.demo import run_demo

    run_demo(folder, steps=steps, vllm_python=vllm)


@app.command("demo-ep")
def demo_ep(
    folder: Annotated[Path, typer.Option(help="The run's folder.")],
    steps: Annotated[int, typer.Option(min=1, help="RL steps.")] = 30,
) -> None:
    """Train the demo's task on several ranks. Start it with torchrun --nproc-per-node 4 -m foreroute.cli demo-ep."""
    from foreroute.cli.demo import run_demo_ep

    run_demo_ep(folder, steps=steps)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    folder: Annotated[Path | None, typer.Option(help="The run's folder; runs/NAME by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
) -> None:
    """Train from a configuration. See docs/train.md. Ctrl-C saves a checkpoint first."""
    from foreroute.cli.train import train_and_report
    from foreroute.train import load_config

    settings = load_config(config)
    train_and_report(settings, folder or Path("runs") / settings.name, resume=resume)


@app.command()
def inspect(trace: Annotated[Path, typer.Argument(help="A trace file.")]) -> None:
    """Show what a routing trace holds."""
    from foreroute.cli.traces import print_trace

    print_trace(trace)


@app.command()
def doctor(
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face folder, its config.json, or a run of foreroute train.")
    ] = None,
    rollout: Annotated[
        Path | None, typer.Option(help="The engine's side: a generation (capture.save_generation) or a trace.")
    ] = None,
    trainer: Annotated[
        Path | None, typer.Option(help="Without --model: the trainer's own pass, a generation or a trace.")
    ] = None,
    replayed: Annotated[Path | None, typer.Option(help="Without --model: its pass with replay, a generation.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=1e-3, help="The engine's; the run's, or 1, by default.")
    ] = None,
    weight_version: Annotated[int | None, typer.Option(help="The trainer's; the run's by default.")] = None,
    max_sequences: Annotated[int | None, typer.Option(min=1, help="Most sequences to run; 64 by default.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also say which layers and flips make the gap: two backwards more.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Also write an HTML page.")] = None,
) -> None:
    """Diagnose trainer and engine. Says how far they differ, why, and if R3 helps; exit code 1 for a problem."""
    from foreroute.cli.doctor import run_doctor
    from foreroute.doctor import Severity

    worst = run_doctor(
        model,
        rollout,
        trainer,
        replayed,
        temperature=temperature,
        weight_version=weight_version,
        max_sequences=max_sequences,
        explain=explain,
        output=output,
    )
    if worst is Severity.PROBLEM:
        raise typer.Exit(1)


@app.command()
def validate(traces: Annotated[list[Path], typer.Argument(help="Trace files.")]) -> None:
    """Check trace files. They must be readable, undamaged, and hold possible routes."""
    from foreroute.cli.traces import validate_traces

    if not validate_traces(traces):
        raise typer.Exit(2)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A trace file, output of an engine, or routes in a .npy file.")],
    target: Annotated[Path, typer.Argument(help="A file that does not exist yet.")],
    to: Annotated[
        Literal["sets", "ordered", "generation"],
        typer.Option(help="Without pick order, with it, or with it and the log-probs of sampled tokens."),
    ] = "sets",
    model: Annotated[
        Path | None, typer.Option(help="For engine output: a trace of the model, or its folder (needs the extra hf).")
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="JSON list of token lists, if the source has none.")] = None,
    start: Annotated[int | None, typer.Option(help="Position of the first row; 0 by default.")] = None,
    weight_version: Annotated[int | None, typer.Option(help="Weights that made the routes; -1: unknown.")] = None,
) -> None:
    """Convert engine output and traces. Writes a trace."""
    from foreroute.cli.convert import convert_file

    convert_file(source, target, to, model=model, tokens=tokens, start=start, weight_version=weight_version)


@app.command()
def diff(
    reference: Annotated[Path, typer.Argument(help="A trace file, for example the trainer's.")],
    other: Annotated[Path, typer.Argument(help="One of the same tokens, for example the engine's.")],
) -> None:
    """Compare two traces. Names the difference; exit code 1 for a defect."""
    from foreroute.cli.traces import print_difference

    if not print_difference(reference, other):
        raise typer.Exit(1)


@app.command()
def plan(
    step: Annotated[list[Path], typer.Argument(help="Trace files of one step, or its counts file, [M, L, G, E].")],
    topology: Annotated[Path, typer.Option(help="TOML (docs/planner.md).")],
    output: Annotated[Path, typer.Option(help="The plan file; the page has .html instead.")] = Path("plan.safetensors"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing plan and page.")] = False,
    previous: Annotated[
        list[Path] | None, typer.Option(help="The plan, and the traces or counts file, of the step before; repeat it.")
    ] = None,
    token_budget: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a rank in a micro-step, of traces; 16384 by default.")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Compare with other balancers.")] = True,
    rows: Annotated[bool, typer.Option("--rows", help="Say what buffers for received rows must hold.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the planner, such as tolerance=0; repeat it."),
    ] = None,
) -> None:
    """Plan a step before it runs. Says where experts live, which are replicated, and who serves which token."""
    from foreroute.cli.plan import parse_options, run_plan

    run_plan(
        topology,
        parse_options(settings or ()),
        output,
        step=step,
        previous=previous or (),
        token_budget=token_budget,
        baselines=baselines,
        rows=rows,
        overwrite=overwrite,
    )


@app.command()
def measure(
    topology: Annotated[Path, typer.Argument(help="TOML (docs/planner.md), of the ranks that torchrun started.")],
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens of a rank in a micro-step.")] = 2048,
) -> None:
    """Measure what the ranks reach, into the topology file. Start it with torchrun -m foreroute.cli measure."""
    from foreroute.cli.measure import run_measurement

    run_measurement(topology, token_budget)


@app.command()
def simulate(
    config: Annotated[Path, typer.Argument(help="TOML (docs/simulate.md).")],
    output: Annotated[Path | None, typer.Option(help="The run's folder; runs/simulate/NAME by default.")] = None,
    fit: Annotated[Path | None, typer.Option(help="Timed steps, JSON Lines, to fit hardware rates to.")] = None,
    rate: Annotated[
        list[str] | None, typer.Option(help="Fit this rate; repeat it. By default gemm_flops_per_s and layer_s.")
    ] = None,
) -> None:
    """Model one RL step on a described cluster. Compares all balancing methods."""
    from foreroute.cli.simulate import run_simulation

    run_simulation(config, output, measurements=fit, rates=rate or ())


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of one or more runs.")],
    output: Annotated[Path | None, typer.Option(help="The page; report.html in the first run by default.")] = None,
) -> None:
    """Write one HTML page about runs."""
    from foreroute.cli.terminal import working
    from foreroute.records import read_runs
    from foreroute.report.run import run_finding, write_report

    console = Console()
    with working("drawing the page", console):
        found = read_runs(runs)
        page = write_report(found, output or runs[0] / "report.html")
    console.print(run_finding(found), highlight=False, markup=False)
    console.print(str(page), soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    main()

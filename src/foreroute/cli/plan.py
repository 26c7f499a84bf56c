"""`foreroute plan`: read a step, plan it, compare with other balancers, write the plan and a page."""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

import foreroute
from foreroute.cli.terminal import Console, shown_facts, shown_table, shown_tiles, working, write_page
from foreroute.costs.cluster_file import Cluster, load_cluster
from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError, InputError, PlanError, shown
from foreroute.files.writing import check_writable, writing_named
from foreroute.layout import Packing
from foreroute.plan import KnownRows, PlanOptions, StepPlan, known_rows, save_plan, verify
from foreroute.plan.counts import COUNTS_FILE, FEW_ENTRIES, MOST_ASSIGNMENTS, tokens_digest
from foreroute.plan.options import PASS_NAMES, PassName
from foreroute.plan.plan_file import PLAN_FILE
from foreroute.plan.received_rows import unrouted_tokens
from foreroute.planner.packed_homes import PackedSequences
from foreroute.report.page import Table, check_page
from foreroute.report.plan import (
    executors_of_ways,
    plan_finding,
    plan_table,
    plan_tiles,
    planning_words,
    rows_table,
    ways_table,
    write_plan_page,
)
from foreroute.simulate.compare import compare_plan, timed_plan
from foreroute.simulate.methods import BALANCERS
from foreroute.simulate.step_files import TOKEN_BUDGET, RecordedStep, StepFiles, read_step
from foreroute.simulate.ways import ways_to_level


def run_plan(
    topology: Path,
    options: PlanOptions,
    output: Path,
    *,
    step: Sequence[Path],
    previous: Sequence[Path] = (),
    token_budget: int | None = None,
    baselines: bool,
    overwrite: bool,
    rows: bool,
) -> None:
    """Plan the step of these files, print the table, write `output` and the page beside it.

    With `rows`, print what buffers for received rows have to hold, and what other policies would reserve.
    """
    page = output.with_suffix(".html")
    _check_target(output, page, overwrite)
    console = Console()
    with working("reading the step", console):
        cluster = load_cluster(topology)
        problem, before = _read(step, cluster, options, previous, token_budget)
        read = None
        if rows and before is not None:  # packed as this one, by length
            read = read_step(before, cluster.topology, cluster.costs, token_budget=token_budget)
    options = replace(options, packing="length")  # which is done: the planner has packed counts
    facts = {"input": ", ".join(map(str, step)), "topology": str(topology)}
    facts |= _facts(problem, cluster, options, token_budget)
    console.print(shown_facts(facts))
    cells = problem.counts_MLGE.shape[0] * problem.counts_MLGE.shape[1]
    with working("planning", console, total=cells, unit="cells") as work:
        found = timed_plan(problem, options, work.advance)
    # counts do not say which sequences they are of; executors refuse a plan of other tokens by this digest
    tokens = tokens_digest(problem.traces) if problem.traces else ""
    found = replace(found, plan=replace(found.plan, packing=problem.packing, tokens_digest=tokens))
    console.print(shown_facts(found.why))
    with working("verifying and writing the plan", console), writing_named(output, PlanError):
        # nothing that breaks a rule of plans is ever written, whatever planned it
        verify(found.plan, problem.counts_MLGE, options)
        save_plan(found.plan, output, overwrite=overwrite)
    console.print(f"{'plan':<9} {output}, {output.stat().st_size:,} bytes, verified", soft_wrap=True, markup=False)
    # static is what every speedup is over, so it is always compared
    balancers = BALANCERS if baselines else {"static": BALANCERS["static"]}
    with working("comparing with other balancers", console, total=len(balancers)) as work:
        compared = compare_plan(found, problem, balancers, work.advance)
    planned = {"planned": planning_words(compared, options.threads)}
    console.print(shown_facts(planned))
    console.print(shown_table(plan_table(compared)))
    with working("packing by routes, and moving homes", console):
        ways = tuple(
            ways_to_level(
                found.plan,
                problem,
                cluster.costs,
                _sequences(problem),
                max_moves=options.home_moves or None,  # if homes stay, what they would reach is still worth knowing
            )
        )
    console.print(plan_finding(compared, ways), highlight=False, markup=False)
    console.print(shown_tiles(plan_tiles(compared, cluster)))
    console.print(shown_table(ways_table(ways)))
    console.print(shown_facts(executors_of_ways()))
    tables: tuple[Table, ...] = ()
    if rows:
        with working("counting the rows of ranks", console):
            rows_before = None
            if read is not None:
                rows_before = known_rows(read.traces or read.counts_MLGE, problem.home_LE, packing=read.packing)
            tables = tuple(_rows_tables(problem, found.plan, cluster.costs, rows_before))
        for table in tables:
            console.print(shown_table(table))
    execute = {}
    if compared.passes_by_plan and compared.pays:
        way = f"foreroute.plan.load_plan({str(output)!r}), then routed.execute: docs/experts.md, docs/megatron.md"
        execute = {"execute": way}
        console.print(shown_facts(execute))
    made = {"made": f"foreroute {foreroute.__version__}, {date.today()}: {shlex.join(['foreroute', *sys.argv[1:]])}"}
    all_facts = facts | planned | found.why | execute | made
    layers = problem.traces[0].spec.layers if problem.traces else ()
    write_page(
        console,
        lambda: write_plan_page(compared, all_facts, page, cluster=cluster, layers=layers, ways=ways, rows=tables),
    )


def _read(
    paths: Sequence[Path], cluster: Cluster, options: PlanOptions, previous: Sequence[Path], token_budget: int | None
) -> tuple[RecordedStep, StepFiles | None]:
    """Read the step, and give the files of the step before; what a file is is told by its content."""
    # experts are at the homes of the plan before; EPLB balances by the loads of the step before
    plans = [path for path in previous if PLAN_FILE.is_in(path)]
    if len(plans) > 1:
        raise InputError(f"--previous names {len(plans)} plans; give the one of the step before")
    files, before = _step_files(paths), _step_files([path for path in previous if path not in plans]) or None
    if isinstance(files, Path):
        if token_budget is not None:
            raise InputError("--token-budget is for traces; counts are packed already")
        if options.packing != "length":
            raise InputError(f"--set packing={options.packing} is for traces; counts are packed already")
    step = read_step(
        files,
        cluster.topology,
        cluster.costs,
        before=before,
        plan_before=plans[0] if plans else None,
        token_budget=token_budget,
        options=options,
    )
    return step, before


def _sequences(step: RecordedStep) -> PackedSequences | None:
    """Count the sequences of traces, unless they are very many."""
    if step.sequences is None or step.packing is None:
        return None
    _, num_layers, _, num_experts = step.counts_MLGE.shape
    # what packing reaches is not worth any memory, nor an error where a layer is too large to be packed by routes
    is_small = step.counts_MLGE[:, 0].sum(dtype=np.int64) <= MOST_ASSIGNMENTS
    return step.sequences() if is_small and len(step.packing.rank_S) * num_layers * num_experts <= FEW_ENTRIES else None


def parse_options(settings: Sequence[str]) -> PlanOptions:
    """Make options of the planner of `key=value`, with values as in TOML; a word needs no quotes.

    Raises:
        ConfigError: for a text without "=", an unknown key, and a value that an option cannot have.
    """
    values: dict[str, object] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {shown(setting)} gives no value; expected key=value, such as tolerance=0")
        try:
            values[key] = tomllib.loads(f"value = {text}")["value"]
        # a bare word is no TOML; nested brackets of a thousand levels are no value either
        except (ValueError, RecursionError):
            values[key] = text
    try:
        return PlanOptions.from_table(values)
    except ConfigError as error:
        raise ConfigError(f"--set: {error}") from error


def _check_target(output: Path, page: Path, overwrite: bool) -> None:
    """Refuse files that cannot be written or may not be replaced, before anything is planned."""
    if output == page:
        raise InputError(f"--output {output} is the name of the page; name the plan file, for example plan.safetensors")
    for path in (output, page):
        with writing_named(path, PlanError):
            if path.exists() and (path.is_dir() or not overwrite):
                raise PlanError(f"{path} already exists; pass another --output, or --overwrite to replace it")
            check_writable(path)
    check_page(page)
    # a mistyped --output must cost nobody a file of another kind
    if output.exists() and output.stat().st_size and not PLAN_FILE.is_in(output):
        raise PlanError(f"{output} is no plan, which is all that --overwrite replaces; nothing was changed")


def _facts(step: RecordedStep, cluster: Cluster, options: PlanOptions, token_budget: int | None) -> dict[str, str]:
    """Say what is planned, for people."""
    num_micro_steps, num_layers, num_ranks, num_experts = step.counts_MLGE.shape
    topology, model, packing = step.topology, cluster.costs.model, step.packing
    assignments = int(step.counts_MLGE.sum(dtype=np.int64))
    # what counts do not tell: seconds and bytes are of these layers
    tokens = f"{assignments / (num_layers * model.top_k):,.0f} tokens at top-{model.top_k}"
    nodes = f"nodes of {topology.ranks_per_node}"
    if topology.num_nodes == 1:
        nodes = f"one node (ranks_per_node {num_ranks}), which needs no cluster link"
    sooner = ", or sooner where traffic between nodes counts" if topology.num_nodes > 1 else ""
    moves = "any number of homes may move" if options.home_moves is None else "homes stay"
    switched = [
        f"stops at {1 + options.tolerance:g} times the mean load{sooner}",
        f"at most {options.home_moves} homes move per layer" if options.home_moves else moves,
        "slots shared by the layers" if options.slots == "shared" else "slots of every layer's own",
    ]
    facts = {}
    if packing is not None:
        facts["packing"] = (
            f"{len(packing.rank_S)} sequences by {_packed_by(packing)}, "
            f"at most {token_budget or TOKEN_BUDGET} tokens of a rank in a micro-step"
        )
    return facts | {
        "step": f"{num_micro_steps} micro-step{'s' * (num_micro_steps > 1)} of {num_layers} of the model's "
        f"{model.num_layers} layers, {num_experts} experts, {assignments:,} assignments: {tokens}",
        "cluster": f"{num_ranks} ranks in {nodes}, redundant slots per rank: {topology.redundant_slots}",
        "options": ", ".join(switched),
    }


def _rows_tables(step: RecordedStep, plan: StepPlan, costs: CostModel, before: KnownRows | None) -> Iterator[Table]:
    """Compare reservations for the rows of each pass, or once for both where they run alike."""
    passes_by_way: dict[bool, list[PassName]] = {}
    for name in PASS_NAMES:
        passes_by_way.setdefault(plan.is_at_home(name), []).append(name)
    top_k, native_MG = None, None  # counts may be of no whole tokens
    if step.packing is not None:
        top_k, native_MG = costs.model.top_k, unrouted_tokens(step.traces, step.packing)
    for at_home, passes in passes_by_way.items():
        known = known_rows(step.counts_MLGE, plan.in_pass(passes[0]), top_k=top_k, native_MG=native_MG)
        served = f"{'at homes' if at_home else 'under the plan'}: {' and '.join(passes)}"
        yield rows_table(known.policies(before), served)


def _step_files(paths: Sequence[Path]) -> StepFiles:
    """Give the counts file of a step; all paths where they are those of traces."""
    counts = [path for path in paths if COUNTS_FILE.is_in(path)]
    if counts and len(paths) > 1:
        raise InputError(f"{counts[0]} holds the counts of a whole step; leave out the {len(paths) - 1} other files")
    return counts[0] if counts else paths


def _packed_by(packing: Packing) -> str:
    """Say what sequences were packed by, and how near to the bound the slowest ranks at the homes are."""
    if (found := packing.certificate) is None:
        return "length"
    saved = 1 - found.slowest / found.by_length if found.by_length else 0.0
    return (
        f"routes (experts' slowest ranks {saved:.1%} below packing by length, {found.over_bound - 1:.1%} above the "
        "bound of any packing at these homes)"
    )

"""`foreroute plan`: read a step, plan it, compare with other balancers, write the plan and a page."""

from __future__ import annotations

import shlex
import sys
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import foreroute
from foreroute.cli.terminal import Console, shown_facts, shown_table, shown_tiles, working, write_page
from foreroute.costs.cluster_file import Cluster, load_cluster
from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError, CountsError, InputError, PlanError, shown
from foreroute.files.writing import check_writable, writing_named
from foreroute.layout import Packing
from foreroute.plan import KnownRows, PlanOptions, StepPlan, known_rows, load_plan, save_plan, verify
from foreroute.plan.counts import (
    COUNTS_FILE,
    FEW_ENTRIES,
    MOST_ASSIGNMENTS,
    check_counts,
    counts_digest,
    load_counts,
    packed_counts,
    tokens_digest,
)
from foreroute.plan.options import PASS_NAMES, PassName
from foreroute.plan.plan_file import PLAN_FILE
from foreroute.plan.received_rows import unrouted_of_sequences, unrouted_tokens
from foreroute.plan.topology import Topology
from foreroute.planner.homes import place_homes
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
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import compare_plan, timed_plan
from foreroute.simulate.methods import BALANCERS
from foreroute.simulate.steps import TOKEN_BUDGET, packed, packed_sequences, read_traces
from foreroute.simulate.ways import ways_to_level
from foreroute.trace import RoutedLayer, RoutingTrace, digest
from foreroute.trace.operations import count_assignments


def run_plan(
    topology: Path, options: PlanOptions, output: Path, *, baselines: bool, overwrite: bool, rows: bool, **inputs: Any
) -> None:
    """Plan what `read_step` makes of `inputs`, print the table, write `output` and the page beside it.

    With `rows`, print what buffers for received rows have to hold, and what other policies would reserve.
    """
    page = output.with_suffix(".html")
    _check_target(output, page, overwrite)
    console = Console()
    with working("reading the step", console):
        step = read_step(topology, options=options, **inputs)
    options = replace(options, packing="length")  # which is done: the planner has packed counts
    problem = step.problem
    facts = {**step.facts, **_facts(step, options)}
    console.print(shown_facts(facts))
    cells = step.counts_MLGE.shape[0] * step.counts_MLGE.shape[1]
    with working("planning", console, total=cells, unit="cells") as work:
        found = timed_plan(problem, options, work.advance)
    # counts do not say which sequences they are of; executors refuse a plan of other tokens by this digest
    found = replace(found, plan=replace(found.plan, packing=step.packing, tokens_digest=step.tokens_digest))
    console.print(shown_facts(found.why))
    with working("verifying and writing the plan", console), writing_named(output, PlanError):
        # nothing that breaks a rule of plans is ever written, whatever planned it
        verify(found.plan, step.counts_MLGE, options)
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
                step.counts_MLGE,
                step.cluster.costs,
                step.sequences,
                max_moves=options.home_moves or None,  # if homes stay, what they would reach is still worth knowing
            )
        )
    console.print(plan_finding(compared, ways), highlight=False, markup=False)
    console.print(shown_tiles(plan_tiles(compared, step.cluster)))
    console.print(shown_table(ways_table(ways)))
    console.print(shown_facts(executors_of_ways()))
    tables: tuple[Table, ...] = ()
    if rows:
        with working("counting the rows of ranks", console):
            before = _rows_before(step, inputs["previous"], inputs["token_budget"])
            tables = tuple(_rows_tables(step, found.plan, before))
        for table in tables:
            console.print(shown_table(table))
    execute = {}
    if compared.passes_by_plan and compared.pays:
        way = f"foreroute.plan.load_plan({str(output)!r}), then routed.execute: docs/experts.md, docs/megatron.md"
        execute = {"execute": way}
        console.print(shown_facts(execute))
    made = {"made": f"foreroute {foreroute.__version__}, {date.today()}: {shlex.join(['foreroute', *sys.argv[1:]])}"}
    all_facts = facts | planned | found.why | execute | made
    write_page(
        console,
        lambda: write_plan_page(
            compared, all_facts, page, cluster=step.cluster, layers=step.layers, ways=ways, rows=tables
        ),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class StepToPlan:
    """A step, ready to be planned."""

    counts_MLGE: NDArray[np.int32]
    cluster: Cluster  # ranks, slots and the cost model
    home_LE: NDArray[np.int16]  # where the experts are now
    previous_LE: NDArray[np.int64] | None  # assignments of the step before, which some balancers go by
    facts: dict[str, str]  # for people, by name
    layers: tuple[RoutedLayer, ...]  # of the traces; none where there are only counts
    packing: Packing | None  # the rank and micro-step of each sequence of the traces
    tokens_digest: str  # of these sequences, by which an executor knows the step
    native_MG: NDArray[np.int64] | None  # tokens of the traces without a route
    sequences: PackedSequences | None  # of the traces, packed so, unless they are very many

    @property
    def topology(self) -> Topology:
        """Ranks and slots."""
        return self.cluster.topology

    @property
    def problem(self) -> BalancerInput:
        """Input of the balancers."""
        return BalancerInput(self.counts_MLGE, self.topology, self.home_LE, self.previous_LE, self.cluster.costs)


def read_step(
    topology: Path,
    step: Sequence[Path],
    *,
    previous: Sequence[Path] = (),
    token_budget: int | None = None,
    options: PlanOptions = PlanOptions(),
) -> StepToPlan:
    """Read everything, and pack the sequences of traces; what the files are is told by their content."""
    # experts are at the homes of the plan before; EPLB balances by the loads of the step before
    plans = [path for path in previous if PLAN_FILE.is_in(path)]
    if len(plans) > 1:
        raise InputError(f"--previous names {len(plans)} plans; give the one of the step before")
    before = [path for path in previous if path not in plans]
    cluster = load_cluster(topology)
    ranks, costs = cluster.topology, cluster.costs
    facts = {"input": ", ".join(map(str, step)), "topology": str(topology)}
    if (counts := _counts_file(step)) is not None:
        if token_budget is not None:
            raise InputError("--token-budget is for traces; counts are packed already")
        if options.packing != "length":
            raise InputError(f"--set packing={options.packing} is for traces; counts are packed already")
        read: list[RoutingTrace] = []
        packing, counts_MLGE = None, check_counts(load_counts(counts), num_ranks=ranks.num_ranks)
        _check_model(costs, counts_MLGE.shape[1], counts_MLGE.shape[3], None, topology)
        _warn_of_odd_counts(counts_MLGE, costs.model.top_k, counts)
        home_LE = _homes(plans, ranks, counts_MLGE.shape[1::2], counts_digest(counts_MLGE))
    else:
        read = read_traces(step)
        spec = read[0].spec
        spec.require_alike("a plan", "in Python, save trace.select_layers of those of one size, and plan that")
        _check_model(costs, spec.num_layers, spec.num_experts, spec.top_k, topology)
        _warn_of_missing_rows(read)
        # the packing becomes part of the plan: the trainer must cut the step as it was planned
        budget = token_budget or TOKEN_BUDGET
        home_LE = _homes(plans, ranks, (spec.num_layers, spec.num_experts), tokens_digest(read))
        packing = packed(read, budget, ranks.num_ranks, costs)
        counts_MLGE = check_counts(packed_counts(read, packing))
        if options.packing == "routes":
            # for the homes that the step will have, as far as counts by length say them
            there_LE = home_LE
            if options.home_moves != 0:
                there_LE = place_homes(counts_MLGE, ranks, home_LE, max_moves=options.home_moves)
            packing = packed(read, budget, ranks.num_ranks, costs, home_LE=there_LE)
            counts_MLGE = check_counts(packed_counts(read, packing))
        facts["packing"] = (
            f"{len(packing.rank_S)} sequences by {_packed_by(packing)}, "
            f"at most {budget} tokens of a rank in a micro-step"
        )
    shape = counts_MLGE.shape[1], counts_MLGE.shape[3]
    sequences = None
    # what packing reaches is not worth any memory, nor an error where a layer is too large to be packed by routes
    is_small = counts_MLGE[:, 0].sum(dtype=np.int64) <= MOST_ASSIGNMENTS
    if packing is not None and is_small and len(packing.rank_S) * shape[0] * shape[1] <= FEW_ENTRIES:
        sequences = packed_sequences(read, packing, budget, costs)
    return StepToPlan(
        counts_MLGE=counts_MLGE,
        cluster=cluster,
        home_LE=home_LE,
        previous_LE=_loads_before(before, counts_MLGE, read) if before else None,
        facts=facts,
        layers=read[0].spec.layers if read else (),
        packing=packing,
        tokens_digest=tokens_digest(read) if read else "",
        native_MG=None if packing is None else unrouted_tokens(read, packing),
        sequences=sequences,
    )


def _warn_of_missing_rows(traces: Sequence[RoutingTrace]) -> None:
    """Warn of tokens without a route, beside the last of a response, which no engine computed."""
    missing = int(np.maximum(unrouted_of_sequences(traces) - 1, 0).sum())
    if missing:
        tokens = sum(len(trace.valid_N) for trace in traces)
        warnings.warn(
            f"{missing:,} of {tokens:,} tokens ({missing / tokens:.1%}) have no routes in these traces, as of a "
            "prefix that was not recorded: the plan does not count them, and a run routes them by itself, to ranks "
            "that nobody knows before. Record all rows",
            stacklevel=1,
        )


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


def _facts(step: StepToPlan, options: PlanOptions) -> dict[str, str]:
    """Say what is planned, for people."""
    num_micro_steps, num_layers, num_ranks, num_experts = step.counts_MLGE.shape
    topology, model = step.topology, step.cluster.costs.model
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
    return {
        "step": f"{num_micro_steps} micro-step{'s' * (num_micro_steps > 1)} of {num_layers} of the model's "
        f"{model.num_layers} layers, {num_experts} experts, {assignments:,} assignments: {tokens}",
        "cluster": f"{num_ranks} ranks in {nodes}, redundant slots per rank: {topology.redundant_slots}",
        "options": ", ".join(switched),
    }


def _rows_tables(step: StepToPlan, plan: StepPlan, before: KnownRows | None) -> Iterator[Table]:
    """Compare reservations for the rows of each pass, or once for both where they run alike."""
    passes_by_way: dict[bool, list[PassName]] = {}
    for name in PASS_NAMES:
        passes_by_way.setdefault(plan.is_at_home(name), []).append(name)
    top_k = None if step.packing is None else step.cluster.costs.model.top_k  # counts may be of no whole tokens
    for at_home, passes in passes_by_way.items():
        known = known_rows(step.counts_MLGE, plan.in_pass(passes[0]), top_k=top_k, native_MG=step.native_MG)
        served = f"{'at homes' if at_home else 'under the plan'}: {' and '.join(passes)}"
        yield rows_table(known.policies(before), served)


def _rows_before(step: StepToPlan, previous: Sequence[Path], token_budget: int | None) -> KnownRows | None:
    """Count the rows at homes of the step before, packed as this one, where its traces or counts are given."""
    paths = [path for path in previous if not PLAN_FILE.is_in(path)]
    if not paths:
        return None
    if (counts := _counts_file(paths)) is not None:
        return known_rows(load_counts(counts), step.home_LE)
    read = read_traces(paths)
    packing = packed(read, token_budget or TOKEN_BUDGET, step.topology.num_ranks, step.cluster.costs)
    return known_rows(read, step.home_LE, packing=packing)


def _counts_file(paths: Sequence[Path]) -> Path | None:
    """Give the counts file of a step; None where the paths are those of traces."""
    counts = [path for path in paths if COUNTS_FILE.is_in(path)]
    if counts and len(paths) > 1:
        raise InputError(f"{counts[0]} holds the counts of a whole step; leave out the {len(paths) - 1} other files")
    return counts[0] if counts else None


def _warn_of_odd_counts(counts_MLGE: NDArray[np.int32], top_k: int, source: Path) -> None:
    """Warn of counts that a step of this model does not have: layers route the same tokens, each to top_k experts."""
    routed_MLG, odd = counts_MLGE.sum(axis=3, dtype=np.int64), []
    for is_wrong_MLG, why in (
        (routed_MLG != routed_MLG[:, :1], "layer 0 has others, and layers route the same tokens"),
        (routed_MLG % top_k > 0, f"that is no multiple of top_k {top_k}, the assignments of a token"),
        (
            counts_MLGE.max(axis=3) > routed_MLG // top_k,
            f"one expert has more than 1/{top_k} of them, but a token picks an expert once (top_k {top_k})",
        ),
    ):
        if len(wrong := np.argwhere(is_wrong_MLG)):
            m, layer, g = wrong[0].tolist()
            odd.append(
                f"layer {layer} has {routed_MLG[m, layer, g]:,} assignments of rank {g} in micro-step {m}: {why}"
            )
    if len(counts_MLGE) and counts_MLGE.min() < counts_MLGE.max():  # counts that are all alike say nothing of it
        if counts_MLGE.shape[2] > 1 and (counts_MLGE == counts_MLGE[:, :, :1]).all():
            odd.append("all ranks have the same counts, as if they were summed over ranks")
        if not (sent_G := counts_MLGE.any(axis=(0, 1, 3))).all():
            odd.append(f"ranks {', '.join(map(str, np.flatnonzero(~sent_G)[:8]))} have no tokens at all")
        if (same_L := (counts_MLGE[:, 1:] == counts_MLGE[:, :-1]).all(axis=(0, 2, 3))).any():
            odd.append(f"layers {same_L.argmax()} and {same_L.argmax() + 1} have the same counts")
    if odd:
        warnings.warn(
            f"{source}: {'; '.join(odd)}. Counts are those that each rank sends, whole, before any capacity drops some",
            stacklevel=2,
        )


def _check_model(costs: CostModel, num_layers: int, num_experts: int, top_k: int | None, source: Path) -> None:
    """Refuse a topology file that describes another model than that of the input; counts do not know top_k."""
    model, of_input = costs.model, (num_experts, costs.model.top_k if top_k is None else top_k)
    if (model.num_experts, model.top_k) != of_input or model.num_layers < num_layers:
        raise ConfigError(
            f"{source} describes {model.num_layers} routed layers with top-{model.top_k} of {model.num_experts} "
            f"experts, the input has {num_layers} with top-{of_input[1]} of {num_experts}; set num_layers, num_experts "
            "and top_k in its [model]"
        )


def _packed_by(packing: Packing) -> str:
    """Say what sequences were packed by, and how near to the bound the slowest ranks at the homes are."""
    if (found := packing.certificate) is None:
        return "length"
    saved = 1 - found.slowest / found.by_length if found.by_length else 0.0
    return (
        f"routes (experts' slowest ranks {saved:.1%} below packing by length, {found.over_bound - 1:.1%} above the "
        "bound of any packing at these homes)"
    )


def _homes(previous: Sequence[Path], topology: Topology, shape: tuple[int, ...], own: str) -> NDArray[np.int16]:
    """Give the homes [L, E] of the plan before, or those of a model that was loaded: blocks of experts.

    `own` is the digest of the step itself, of its tokens or its counts.
    """
    if not previous:
        return np.tile(topology.contiguous_home_E(shape[1]), (shape[0], 1))
    plan = load_plan(previous[0])
    if plan.home_LE.shape != shape or plan.topology.num_ranks != topology.num_ranks:
        raise PlanError(
            f"{previous[0]} is a plan of {list(plan.home_LE.shape)} layers and experts on {plan.topology.num_ranks} "
            f"ranks; expected {list(shape)} on {topology.num_ranks}"
        )
    if own in (plan.tokens_digest, plan.counts_digest):
        raise InputError(f"--previous {previous[0]} is a plan of the step itself; give that of the step before")
    return plan.home_LE


def _loads_before(
    paths: Sequence[Path], counts_MLGE: NDArray[np.int32], read: Sequence[RoutingTrace]
) -> NDArray[np.int64]:
    """Read assignments [L, E] of the step before, from a counts file or from traces that are not those of this step."""
    shape = counts_MLGE.shape[1], counts_MLGE.shape[3]
    if (counts := _counts_file(paths)) is not None:
        loads_LE: NDArray[np.int64] = load_counts(counts).sum(axis=(0, 2), dtype=np.int64)
    else:
        traces, own = read_traces(paths), {digest(trace) for trace in read}
        for path, trace in zip(paths, traces, strict=True):
            if len(trace) and digest(trace) in own:
                raise InputError(f"--previous {path} holds sequences of the step itself; give those of the step before")
        parts = [count_assignments(trace, np.zeros(len(trace), np.int64)).sum(axis=0) for trace in traces]
        loads_LE = np.sum(parts, axis=0)
    if loads_LE.shape != shape:
        raise CountsError(
            f"{paths[0]} has {loads_LE.shape[0]} layers of {loads_LE.shape[1]} experts, the step to plan "
            f"{shape[0]} of {shape[1]}; expected the same model"
        )
    if np.array_equal(loads_LE, counts_MLGE.sum(axis=(0, 2), dtype=np.int64)):
        warnings.warn(
            f"--previous {paths[0]} has the very counts of the step itself, by which “EPLB, previous step” would look "
            "as good as one that knew the step; give those of the step before",
            stacklevel=2,
        )
    return loads_LE

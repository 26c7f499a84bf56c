"""`foreroute inspect`, `foreroute validate` and `foreroute diff`: verbs that look at trace files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Column, Table

from foreroute.capture.checks import refuse_frozen_rows
from foreroute.cli.terminal import Console, shown_facts, working
from foreroute.errors import InputError, printable
from foreroute.mismatch import Defect, Explanation, explain
from foreroute.mismatch.decisions import misplaced_masks, stream_difference
from foreroute.report.format import quoted
from foreroute.trace import NO_VERSION, SAMPLING, RoutingTrace, digest, load
from foreroute.trace.operations import count_assignments

POSITION_BINS = 8
"""Rows of the table of overlap by position."""
MOST_SHOWN, MOST_LETTERS = 32, 2000
"""Most facts and weight versions, and most letters of one: a file may hold a mebibyte of them."""


def print_trace(path: Path) -> None:
    """Print facts about a trace file, and the load of its experts by layer."""
    console = Console()
    with working(f"reading {path}", console) as work:
        trace = load(path)
        work.begin(f"counting the routes of {path}")
        facts, layers = _facts(path, trace), _layers(trace)
    console.print(_one_line(path), markup=False, highlight=False)
    console.print(shown_facts(facts))
    console.print("\nExpert load by layer:")
    console.print(layers)


def validate_traces(paths: list[Path]) -> bool:
    """Say of each file whether it is a sound trace; False when one is not."""
    console = Console(soft_wrap=True, highlight=False)
    sound = True
    for number, path in enumerate(paths):
        try:
            with working(f"reading {path}", console) as work:
                if len(paths) > 1:
                    work.advance(number, len(paths))
                trace = load(path)
                # a sound file may hold routes of an engine that stopped to write them, and training would replay those
                refuse_frozen_rows(trace)
        except InputError as error:
            sound = False
            console.print(f"[bold red]refused[/]  {escape(f'{_one_line(path)}: {_one_line(error)}')}")
        else:
            console.print(f"[green]sound[/]    {escape(f'{_one_line(path)}: {trace!r}')}")
    return sound


def print_difference(reference: Path, other: Path) -> bool:
    """Print overlap by layer and position, other sets, and the defect that explains it; False when there is one.

    Raises:
        InputError: when no row is routed in both traces, or they are of other models or tokens.
    """
    console = Console()
    with working(f"reading {reference} and {other}", console) as work:
        trace, compared = load(reference), load(other)
        work.begin("comparing")
        found = explain(trace, compared)
    console.print("Picks that both traces share:")  # a table's own title is wrapped in the table's width
    shares = zip(trace.spec.layers, found.overlap_by_layer_L, strict=True)
    console.print(_table(("layer", "share"), [(str(layer), f"{share:.2%}") for layer, share in shares]))
    console.print(_by_position(found))
    natural = found.defect is Defect.NONE
    colour = "green" if natural else "bold red"
    console.print(f"[{colour}]{found.defect}[/]  {escape(found.sentence)}", highlight=False)
    # equal routes do not make other decisions equal: a stream may be lost or shifted alone
    natural &= _same_streams(trace, compared, console)
    command = f"foreroute doctor --trainer {quoted(reference)} --rollout {quoted(other)} --output doctor.html"
    console.print(f"page   {printable(command)}", soft_wrap=True, highlight=False, markup=False)
    return natural


def _same_streams(trace: RoutingTrace, other: RoutingTrace, console: Console) -> bool:
    """Print how decisions beside routes differ; False when the other trace lacks some, or has those of other rows."""
    sound = True
    if not np.array_equal(trace.token_ids_N, other.token_ids_N):  # another order, which the explanation names
        return sound
    # the last token of a sequence is before none, and engines do not compute it
    last = trace.offsets[1:][trace.lengths > 0] - 1
    for name in sorted({*trace.streams, *other.streams}):
        if name not in other.streams:
            console.print(f"[bold red]{name}[/]  the other trace has none")
            sound = False
            continue
        if name not in trace.streams:  # such as masks, which no trainer makes
            console.print(f"[blue]{name}[/]  the reference has none to compare with")
            continue
        found = stream_difference(*(each.streams[name].without(last) for each in (trace, other)))
        sentence = f"the sets of all {found.rows} rows are the same"
        if found.first is not None:
            sequence = int(np.searchsorted(trace.offsets, found.first, side="right") - 1)
            sentence = (
                f"{found.differing} of {found.rows} rows have other sets, which share {found.shared:.1%} of their ids; "
                f"{found.alone[0]} rows have sets in the reference alone, {found.alone[1]} in the other trace alone. "
                f"The first is position {found.first - int(trace.offsets[sequence])} of sequence {sequence}"
            )
        console.print(f"[{'red' if any(found.alone) else 'green'}]{name}[/]  {sentence}.", highlight=False)
        sound &= not any(found.alone)
    for side, each in (("the reference", trace), ("the other trace", other)):
        if wrong := misplaced_masks(each):
            console.print(f"[bold red]{SAMPLING}[/]  in {side}, {wrong}.", highlight=False)
            sound = False
    return sound


def _facts(path: Path, trace: RoutingTrace) -> dict[str, str]:
    """Say what a trace holds, for people."""
    spec, lengths, claims = trace.spec, trace.lengths, list(trace.provenance.items())
    versions = ["not stated" if version == NO_VERSION else str(version) for version in trace.versions]
    facts = {
        "model": spec.model or "not stated",
        "routing": f"{spec.routing} experts in {spec.num_layers} layers",
        "sequences": f"{len(trace)}" + (f", of {lengths.min()} to {lengths.max()} tokens" if len(trace) else ""),
        "rows": f"{trace.num_rows}, of which {int(trace.valid_N.sum())} routed",
        "weight versions": _few(versions) or "none",
        "pick order": "kept" if trace.pick_order_kept else "dropped",
        "routes in memory": f"{trace.expert_ids_NLK.nbytes:,} bytes, {trace.expert_ids_NLK.dtype}",
        **{f"stream {name}": f"{each}, {len(each.ids)} ids" for name, each in trace.streams.items()},
        "file": f"{path.stat().st_size:,} bytes",
        "digest": digest(trace),
        # what the file's writer claims; named so that it cannot pass for a fact above
        **{f"provenance: {_one_line(key)}": value for key, value in claims[:MOST_SHOWN]},
        **({"provenance": f"{len(claims) - MOST_SHOWN} more facts"} if len(claims) > MOST_SHOWN else {}),
    }
    return {name: _one_line(value) for name, value in facts.items()}


def _few(values: list[str]) -> str:
    """List the first of them, and how many more there are."""
    return ", ".join(values[:MOST_SHOWN]) + (f" and {len(values) - MOST_SHOWN} more" * (len(values) > MOST_SHOWN))


def _one_line(text: object) -> str:
    """Give `text` as one line that a terminal shows and does not obey, and that is not longer than a few screens."""
    line = str(text)
    cut = f"{line[:MOST_LETTERS]}... ({len(line)} characters)" if len(line) > MOST_LETTERS else line
    return printable(cut).replace("\n", "\\n")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table of Rich, its cells on the right."""
    table = Table(*(Column(heading, justify="right") for heading in headings))
    for row in rows:
        table.add_row(*row)
    return table


def _layers(trace: RoutingTrace) -> Table:
    """Show the load of the experts by layer."""
    counts_LE = count_assignments(trace, np.zeros(len(trace), np.int64)).sum(axis=0)  # zeros where the trace is empty
    rows = []
    for layer, (num_experts, _), counts_E in zip(trace.spec.layers, trace.spec.sizes_L, counts_LE, strict=True):
        counts = counts_E[:num_experts]
        total = max(int(counts.sum()), 1)
        # an expert that was never picked adds nothing to the entropy, and has no logarithm
        share = counts[counts > 0] / total
        busiest = f"{counts.max() * num_experts / total:.2f}"
        entropy = f"{(share * np.log2(1 / share)).sum():.2f} of {np.log2(num_experts):.2f}"
        rows.append((str(layer), str(int(counts.argmax())), busiest, str(int((counts == 0).sum())), entropy))
    return _table(("layer", "busiest expert", "its load over the mean", "experts never picked", "entropy, bits"), rows)


def _by_position(found: Explanation) -> Table:
    """Show the same by stretches of positions: a shift or a lost prefix is seen there."""
    longest, rows = len(found.overlap_by_position_T), []
    edges = np.unique(np.linspace(0, longest, min(POSITION_BINS, longest) + 1, dtype=int))
    for start, stop in pairwise(edges.tolist()):
        shares = found.overlap_by_position_T[start:stop]
        known = shares[~np.isnan(shares)]
        positions = f"{start} to {stop - 1}" if stop - start > 1 else str(start)
        rows.append((positions, f"{known.mean():.2%}" if len(known) else "no row in both"))
    return _table(("positions", "share"), rows)

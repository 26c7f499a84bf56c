"""`foreroute diff`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table

from foreroute.cli.alive import working
from foreroute.cli.terminal import Console
from foreroute.mismatch import Defect, Explanation, explain
from foreroute.trace import RoutingSpec, load

POSITION_BINS = 8


def print_difference(reference: Path, other: Path) -> bool:
    """Overlap by layer and position, and the defect that explains it; False when there is one."""
    console = Console()
    with working(f"reading {reference} and {other}", console) as work:
        trace, compared = load(reference), load(other)
        work.begin("comparing")
        found = explain(trace, compared)
    console.print("Picks that both traces share:")  # a table's own title is wrapped in the table's width
    console.print(_by_layer(found, trace.spec))
    console.print(_by_position(found))
    natural = found.kind is Defect.NONE
    colour = "green" if natural else "bold red"
    console.print(f"[{colour}]{found.kind}[/]  {escape(found.sentence)}", highlight=False)
    return natural


def _by_layer(found: Explanation, spec: RoutingSpec) -> Table:
    table = Table()
    table.add_column("layer")
    table.add_column("share", justify="right")
    for layer, share in zip(spec.layers, found.overlap_by_layer_L, strict=True):
        table.add_row(str(layer), f"{share:.2%}")
    return table


def _by_position(found: Explanation) -> Table:
    table = Table()
    table.add_column("positions")
    table.add_column("share", justify="right")
    longest = len(found.overlap_by_position_T)
    edges = np.unique(np.linspace(0, longest, min(POSITION_BINS, longest) + 1, dtype=int))
    for start, stop in pairwise(edges.tolist()):
        shares = found.overlap_by_position_T[start:stop]
        known = shares[~np.isnan(shares)]
        positions = f"{start} to {stop - 1}" if stop - start > 1 else str(start)
        table.add_row(positions, f"{known.mean():.2%}" if len(known) else "no row in both")
    return table

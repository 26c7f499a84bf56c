"""Parts of experts, and where they go, when experts change their homes: arithmetic, without torch or processes.

The shard of a rank holds its experts in ascending order of their id. An expert has several tensors: its weights, and
for each of them what the optimizer keeps. Expert-data-parallel ranks, if there are any, hold the same experts: each has
all weights, and all of the state or, under a distributed optimizer, a part of it that need not be the same for each row
of the shard. So what moves is a *segment*: a range of elements of one tensor of one expert.

Axis letters: E experts, G expert-parallel ranks, D expert-data-parallel ranks of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TransferError


class Move(NamedTuple):
    """An expert to be copied from rank to rank, and its rows of their shards."""

    source: int
    source_row: int
    target: int
    target_row: int


def shard_moves(before_E: NDArray[np.integer], after_E: NDArray[np.integer]) -> list[Move]:
    """List the moves of every expert of a layer whose rank or row changes with its home rank, integers [E].

    Every rank is home to as many experts as before.
    """
    columns = before_E, _row_E(before_E), after_E, _row_E(after_E)
    moves = [Move(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]
    return [move for move in moves if move[:2] != move[2:]]


def _row_E(home_E: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 [E], the row of every expert in the shard of its home rank."""
    order = np.argsort(home_E, kind="stable")
    # An expert's position in this order, less that of the first of its rank, is how many of its rank come before it.
    sorted_E = home_E[order]
    row_E = np.empty(len(home_E), np.int64)
    row_E[order] = np.arange(len(home_E)) - np.searchsorted(sorted_E, sorted_E)
    return row_E


class Extent(NamedTuple):
    """The part of an expert's tensor that a rank holds: elements `start` to `stop` of the flattened tensor."""

    start: int
    stop: int
    whole: int  # elements of the tensor
    dtype: str  # of torch


@dataclass(frozen=True)
class LayerExtents:
    """Parts of one layer that a rank holds."""

    # of the expert in each row, by name; tensors that the rank holds nothing of may be left out
    rows: list[dict[str, Extent]]
    # state of the optimizer without dimensions, such as (name, number of steps); of some expert each
    counts: frozenset[tuple[str, float]]


class Segment(NamedTuple):
    """Elements `start` to `stop` of a tensor of one expert, and the ranks, by number, and rows that it goes between."""

    source: int
    source_row: int
    target: int
    target_row: int
    name: str
    start: int
    stop: int


def segments_for(
    rank: int, moves: Sequence[Move], number_GD: NDArray[np.int64], of_ranks: Sequence[LayerExtents]
) -> list[Segment]:
    """List the segments of a layer that a rank sends or receives, in an order that is the same at both ends of each.

    `number_GD` has the number of each rank in their group, `of_ranks` what each of the group holds of the layer, as
    `require_complete` wants it. What several ranks hold comes from the one of the receiver's expert-data-parallel rank.
    """
    own_ep_rank = int(np.argwhere(number_GD == rank)[0, 0])
    here = [move for move in moves if own_ep_rank in (move.source, move.target)]
    segments = (segment for move in here for segment in _segments_of(move, number_GD.tolist(), of_ranks))
    return [segment for segment in segments if rank in (segment.source, segment.target)]


def _segments_of(move: Move, number_GD: list[list[int]], of_ranks: Sequence[LayerExtents]) -> Iterator[Segment]:
    sources_D, targets_D = number_GD[move.source], number_GD[move.target]
    for d, target in enumerate(targets_D):
        nearest = [sources_D[d], *sources_D[:d], *sources_D[d + 1 :]]
        leaving = [(source, of_ranks[source].rows[move.source_row]) for source in nearest]
        for name, wanted in sorted(of_ranks[target].rows[move.target_row].items()):
            held = [(source, extents[name]) for source, extents in leaving if name in extents]
            # `require_complete` has seen to it that the parts cover every element from `wanted.start` to its end
            at = wanted.start
            while at < wanted.stop:
                source, extent = next((s, e) for s, e in held if e.start <= at < e.stop)
                stop = min(extent.stop, wanted.stop)
                yield Segment(source, move.source_row, target, move.target_row, name, at, stop)
                at = stop


def require_complete(of_ranks: Sequence[LayerExtents], number_GD: NDArray[np.int64], where: str) -> None:
    """Raise `TransferError` unless experts have the same tensors, each whole over the ranks that hold the expert."""
    first = _describe_tensors([of_ranks[number].rows[0] for number in number_GD[0]])
    for ep_rank, numbers_D in enumerate(number_GD.tolist()):
        for row in range(len(of_ranks[0].rows)):
            found = _describe_tensors([of_ranks[number].rows[row] for number in numbers_D])
            in_part = {name for name, share in found.items() if share.startswith("a part")}
            if differing := sorted(in_part | {name for name, _ in found.items() ^ first.items()}):
                raise TransferError(
                    f"{where}: {differing[0]} is {first.get(differing[0], 'not kept')} for local expert 0 of "
                    f"expert-parallel rank 0 and {found.get(differing[0], 'not kept')} for local expert {row} of "
                    f"expert-parallel rank {ep_rank}, so experts cannot take each other's rows. Step the optimizer on "
                    "all ranks or on none before homes are moved"
                )
    counts = sorted(frozenset().union(*(parts.counts for parts in of_ranks)))
    if len({name for name, _ in counts}) < len(counts):
        raise TransferError(
            f"{where}: the optimizer counts differently for different experts, {counts}, and counts do not move; train "
            "all experts in every step"
        )


def _describe_tensors(parts: list[dict[str, Extent]]) -> dict[str, str]:
    """Say of each tensor of one expert how many elements of which dtype it has, and whether all of them are held."""
    found = {}
    for name in {name for extents in parts for name in extents}:
        held = sorted((extents[name] for extents in parts if name in extents), key=lambda extent: extent.start)
        # parts may overlap; the tensor is whole if none of them, in order, begins beyond what is covered so far
        reached = 0
        for extent in held:
            if extent.start <= reached:
                reached = max(reached, extent.stop)
        share = "all" if reached == held[0].whole else "a part"
        found[name] = f"{share} of {held[0].whole} elements of {held[0].dtype}"
    return found

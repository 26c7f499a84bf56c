"""Which part of which tensor goes from which rank to which, when experts change their slots. No torch, no processes.

An expert has several tensors: its weights, and for each of them what the optimizer keeps. The ranks that hold one
expert-parallel place are its *copies*: each has all weights, and all of the state or, under a distributed optimizer, a
part of it that need not be the same from slot to slot. Axis letters: G expert-parallel places, D copies of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.ep.transfer.moves import Moves
from foreroute.errors import TransferError


@dataclass(frozen=True)
class Extent:
    """The part of an expert's tensor that a rank holds.

    Attributes:
        start: its first element, of the flattened tensor.
        stop: the one after its last.
        whole: elements of the tensor.
        dtype: of torch, by name.
    """

    start: int
    stop: int
    whole: int
    dtype: str


Slot = dict[str, Extent]
"""Tensors of the expert in one slot, by name. Those that a rank holds nothing of may be left out."""


@dataclass(frozen=True)
class LayerParts:
    """What a rank holds of one layer.

    Attributes:
        slots: of each slot.
        counts: state of the optimizer without dimensions, such as (name, number of steps); of some expert each.
    """

    slots: list[Slot]
    counts: frozenset[tuple[str, float]]


@dataclass(frozen=True)
class Copy:
    """Elements `start` to `stop` of one tensor of one expert.

    Attributes:
        source: number of the rank that sends them, in the group.
        source_slot: of the expert there.
        target: number of the rank that gets them.
        target_slot: of the expert there.
        name: of the tensor.
        start: first element.
        stop: the one after the last.
    """

    source: int
    source_slot: int
    target: int
    target_slot: int
    name: str
    start: int
    stop: int


def copies_for(rank: int, moves: Moves, number_GD: NDArray[np.int64], of_ranks: Sequence[LayerParts]) -> list[Copy]:
    """The copies of one layer that a rank takes part in, in an order that is the same on both ends of each.

    A part that several ranks hold comes from the one that is the same copy of its place as the receiver.

    Args:
        rank: number of the rank in the group.
        moves: of the layer, between places.
        number_GD: int64 [G, D], the number in the group of each rank.
        of_ranks: what each rank of the group holds of the layer, as `require_complete` wants it.
    """
    found = []
    own_place = int(np.argwhere(number_GD == rank)[0, 0])
    for v in np.argsort(moves.round_V, kind="stable").tolist():
        source, target = int(moves.source_V[v]), int(moves.target_V[v])
        if own_place not in (source, target):
            continue
        rows = int(moves.source_row_V[v]), int(moves.target_row_V[v])
        copies = _copies_of(number_GD[source].tolist(), number_GD[target].tolist(), rows, of_ranks)
        found += [copy for copy in copies if rank in (copy.source, copy.target)]
    return found


def _copies_of(
    sources_D: list[int], targets_D: list[int], rows: tuple[int, int], of_ranks: Sequence[LayerParts]
) -> Iterator[Copy]:
    """All copies of one expert."""
    source_slot, target_slot = rows
    for d, target in enumerate(targets_D):
        nearest = [sources_D[d], *sources_D[:d], *sources_D[d + 1 :]]
        leaving = [(source, of_ranks[source].slots[source_slot]) for source in nearest]
        for name, wanted in sorted(of_ranks[target].slots[target_slot].items()):
            held = [(source, slot[name]) for source, slot in leaving if name in slot]
            at = wanted.start
            while at < wanted.stop:
                source, extent = next((s, e) for s, e in held if e.start <= at < e.stop)
                stop = min(extent.stop, wanted.stop)
                yield Copy(source, source_slot, target, target_slot, name, at, stop)
                at = stop


def require_complete(of_ranks: Sequence[LayerParts], number_GD: NDArray[np.int64], where: str) -> None:
    """Raise `TransferError` unless all experts have the same tensors, each whole over the copies of its place.

    Args:
        of_ranks: what each rank of the group holds of a layer.
        number_GD: int64 [G, D], the number in the group of each rank.
        where: the layer in words, for errors.
    """
    first = _kinds([of_ranks[number].slots[0] for number in number_GD[0]])
    for place, numbers_D in enumerate(number_GD.tolist()):
        for slot in range(len(of_ranks[0].slots)):
            kinds = _kinds([of_ranks[number].slots[slot] for number in numbers_D])
            if differing := sorted({name for name, _ in kinds.items() ^ first.items()}):
                raise TransferError(
                    f"{where}: {differing[0]} is {_in_words(first.get(differing[0]))} for slot 0 of place 0 and "
                    f"{_in_words(kinds.get(differing[0]))} for slot {slot} of place {place}, so experts cannot take "
                    "each other's places. Step the optimizer on all ranks or on none before homes are moved"
                )
    counts = sorted(frozenset().union(*(parts.counts for parts in of_ranks)))
    if len({name for name, _ in counts}) < len(counts):
        raise TransferError(
            f"{where}: the optimizer counts differently for different experts, {counts}, and counts do not move; train "
            "all experts in every step"
        )


def _kinds(copies: list[Slot]) -> dict[str, tuple[int, str, bool]]:
    """(elements, dtype, whether the parts that are held make up the whole) of each tensor of one slot."""
    kinds = {}
    for name in {name for slot in copies for name in slot}:
        held = sorted((slot[name] for slot in copies if name in slot), key=lambda extent: extent.start)
        reached = 0
        for extent in held:
            if extent.start <= reached:
                reached = max(reached, extent.stop)
        kinds[name] = (held[0].whole, held[0].dtype, reached == held[0].whole)
    return kinds


def _in_words(kind: tuple[int, str, bool] | None) -> str:
    if kind is None:
        return "not kept"
    whole, dtype, is_complete = kind
    return f"{'all' if is_complete else 'a part'} of {whole} elements of {dtype}"

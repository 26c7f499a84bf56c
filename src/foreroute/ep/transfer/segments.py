"""What one layer's experts hold on this rank, and which part of it goes where when experts change their slots.

A *slot* is a position among the home experts of a rank, which has them in ascending order of their id.

An expert has several tensors: its weights, and for each of them what the optimizer keeps. Expert-data-parallel ranks,
if there are any, hold the same experts: each has all weights, and all of the state or, under a distributed optimizer, a
part of it that need not be the same from slot to slot. So what moves is a *segment*: a range of elements of one tensor
of one expert.
Which segments there are is computed from what all ranks say they hold, without torch or processes; `LayerTransfer` then
sends them. Axis letters: G expert-parallel ranks, D expert-data-parallel ranks of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer.moves import Moves
from foreroute.ep.transfer.peers import Exchange, Message, PeerGroup
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


SlotExtents = dict[str, Extent]
"""Tensors of the expert in one slot, by name. Those that a rank holds nothing of may be left out."""


@dataclass(frozen=True)
class LayerExtents:
    """What a rank holds of one layer.

    Attributes:
        slots: of each slot.
        counts: state of the optimizer without dimensions, such as (name, number of steps); of some expert each.
    """

    slots: list[SlotExtents]
    counts: frozenset[tuple[str, float]]


@dataclass(frozen=True)
class Segment:
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


def segments_for(
    rank: int, moves: Moves, number_GD: NDArray[np.int64], of_ranks: Sequence[LayerExtents]
) -> list[Segment]:
    """The segments of one layer that a rank sends or receives, in an order that is the same at both ends of each.

    A part that several ranks hold comes from the one with the receiver's own expert-data-parallel rank.

    Args:
        rank: number of the rank in the group.
        moves: of the layer, between expert-parallel ranks.
        number_GD: int64 [G, D], the number in the group of each rank.
        of_ranks: what each rank of the group holds of the layer, as `require_complete` wants it.
    """
    found = []
    own_ep_rank = int(np.argwhere(number_GD == rank)[0, 0])
    for v in np.argsort(moves.round_V, kind="stable").tolist():
        source, target = int(moves.source_V[v]), int(moves.target_V[v])
        if own_ep_rank not in (source, target):
            continue
        rows = int(moves.source_row_V[v]), int(moves.target_row_V[v])
        segments = _segments_of(number_GD[source].tolist(), number_GD[target].tolist(), rows, of_ranks)
        found += [segment for segment in segments if rank in (segment.source, segment.target)]
    return found


def _segments_of(
    sources_D: list[int], targets_D: list[int], rows: tuple[int, int], of_ranks: Sequence[LayerExtents]
) -> Iterator[Segment]:
    """All segments of one expert."""
    source_slot, target_slot = rows
    for d, target in enumerate(targets_D):
        nearest = [sources_D[d], *sources_D[:d], *sources_D[d + 1 :]]
        leaving = [(source, of_ranks[source].slots[source_slot]) for source in nearest]
        for name, wanted in sorted(of_ranks[target].slots[target_slot].items()):
            held = [(source, slot[name]) for source, slot in leaving if name in slot]
            # `require_complete` has seen to it that the parts cover every element from `wanted.start` to its end
            at = wanted.start
            while at < wanted.stop:
                source, extent = next((s, e) for s, e in held if e.start <= at < e.stop)
                stop = min(extent.stop, wanted.stop)
                yield Segment(source, source_slot, target, target_slot, name, at, stop)
                at = stop


def require_complete(of_ranks: Sequence[LayerExtents], number_GD: NDArray[np.int64], where: str) -> None:
    """Raise `TransferError` unless all experts have the same tensors, each whole over the ranks that hold the expert.

    Args:
        of_ranks: what each rank of the group holds of a layer.
        number_GD: int64 [G, D], the number in the group of each rank.
        where: the layer in words, for errors.
    """
    first = _kinds([of_ranks[number].slots[0] for number in number_GD[0]])
    for ep_rank, numbers_D in enumerate(number_GD.tolist()):
        for slot in range(len(of_ranks[0].slots)):
            kinds = _kinds([of_ranks[number].slots[slot] for number in numbers_D])
            if differing := sorted({name for name, _ in kinds.items() ^ first.items()}):
                raise TransferError(
                    f"{where}: {differing[0]} is {_in_words(first.get(differing[0]))} for slot 0 of expert-parallel "
                    f"rank 0 and {_in_words(kinds.get(differing[0]))} for slot {slot} of expert-parallel rank "
                    f"{ep_rank}, so experts cannot take each other's slots. Step the optimizer on all ranks or on none "
                    "before homes are moved"
                )
    counts = sorted(frozenset().union(*(parts.counts for parts in of_ranks)))
    if len({name for name, _ in counts}) < len(counts):
        raise TransferError(
            f"{where}: the optimizer counts differently for different experts, {counts}, and counts do not move; train "
            "all experts in every step"
        )


def _kinds(parts: list[SlotExtents]) -> dict[str, tuple[int, str, bool]]:
    """(elements, dtype, whether the parts that are held make up the whole) of each tensor of one slot."""
    kinds = {}
    for name in {name for slot in parts for name in slot}:
        held = sorted((slot[name] for slot in parts if name in slot), key=lambda extent: extent.start)
        # parts may overlap; the tensor is whole if none of them, in order, begins beyond what is covered so far
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


@dataclass(frozen=True)
class HeldTensor:
    """A part of one tensor of an expert.

    Attributes:
        extent: which part.
        tensor: flat, in the memory that the model or the optimizer uses.
    """

    extent: Extent
    tensor: Tensor

    @classmethod
    def of(cls, tensor: Tensor, start: int = 0, whole: int | None = None) -> HeldTensor:
        """What is held of a tensor of `whole` elements from `start` on; all of it by default."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(Extent(start, start + len(tensor), len(tensor) if whole is None else whole, dtype), tensor)

    def part(self, segment: Segment) -> Tensor:
        """The elements of a segment, as a view."""
        return self.tensor[segment.start - self.extent.start : segment.stop - self.extent.start]


@dataclass
class LayerTransfer:
    """What one layer sends and gets.

    Attributes:
        where: the layer in words.
        slots: what this rank holds in each slot.
        counts: as in `LayerExtents`.
        segments: those that this rank sends or receives.
        copies: what is not in one piece, and the copy of it that is in `slots`.
        staged: for each segment that it receives, where it belongs, and the memory that it arrives in.
        received: bytes of them that come from other ranks.
    """

    where: str
    slots: Sequence[Mapping[str, HeldTensor]]
    counts: frozenset[tuple[str, float]] = frozenset()
    segments: Sequence[Segment] = ()
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    received: int = 0

    @property
    def parts(self) -> LayerExtents:
        """What this rank holds, without the tensors: what it tells the other ranks."""
        return LayerExtents([{name: held.extent for name, held in slot.items()} for slot in self.slots], self.counts)

    def allocate(self, rank: int) -> None:
        """Take the memory for what arrives at this rank, whose number among the peers is `rank`."""
        for segment in self.segments:
            if segment.target == rank:
                target = self.slots[segment.target_slot][segment.name].part(segment)
                self.staged.append((target, torch.empty_like(target)))

    def begin(self, peers: PeerGroup) -> Exchange:
        """Begin to bring what belongs on this rank into memory of its own; it is there when the exchange is over."""
        sends, receives = [], []
        buffers = iter([buffer for _, buffer in self.staged])
        # both ends list the segments of a pair of ranks in the same order, so a count tells a message from the others
        number_of: Counter[tuple[int, int]] = Counter()
        for segment in self.segments:
            pair = segment.source, segment.target
            number_of[pair] += 1
            if segment.source != peers.rank:
                receives.append(Message(segment.source, number_of[pair], next(buffers)))
                continue
            leaving = self.slots[segment.source_slot][segment.name].part(segment)
            if segment.target == peers.rank:
                next(buffers).copy_(leaving)
            else:
                sends.append(Message(segment.target, number_of[pair], leaving))
        self.received = sum(message.tensor.nbytes for message in receives)
        return peers.begin(sends, receives, f"moving homes of {self.where}")

    def commit(self) -> None:
        """Overwrite what was there, in place: buffers of gradients and optimizers go on with the same memory.

        Autograd is told, so that a backward pass that still needs what was there is refused.
        """
        with torch.no_grad():
            for target, buffer in (*self.staged, *self.copies):
                target.copy_(buffer)

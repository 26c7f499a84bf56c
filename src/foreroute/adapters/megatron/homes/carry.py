"""The tensors of a layer's experts on this rank, and their way to and from other ranks, beside what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foreroute.adapters.megatron.homes.copies import Copy, Extent, LayerParts
from foreroute.adapters.megatron.homes.optimizers import Kept
from foreroute.ep.transfer.peers import Exchange, Message, PeerGroup
from foreroute.errors import TransferError


@dataclass(frozen=True)
class Held:
    """A part of one tensor of an expert.

    Attributes:
        extent: which part.
        tensor: flat, in the memory that the model or the optimizer uses.
    """

    extent: Extent
    tensor: Tensor

    def part(self, copy: Copy) -> Tensor:
        """Some of it, in place."""
        return self.tensor[copy.start - self.extent.start : copy.stop - self.extent.start]


def held_in(slot: Mapping[str, nn.Parameter], state: Mapping[nn.Parameter, Kept]) -> dict[str, Held]:
    """The parameters of one expert, and what the optimizer keeps for them, by name.

    Raises:
        TransferError: when the two are not on the same device.
    """
    held = {}
    for name, parameter in slot.items():
        held[name] = _held(parameter.detach().view(-1), 0, None)
        kept = state.get(parameter, Kept({}))
        for key, tensor in kept.tensors.items():
            if tensor.device != parameter.device:
                raise TransferError(
                    f"{key} of {name} is on {tensor.device} and the parameter on {parameter.device}; bring what was "
                    "offloaded back before homes are moved"
                )
            held[f"{name}, {key}"] = _held(tensor, kept.start, kept.whole)
    return held


def _held(tensor: Tensor, start: int, whole: int | None) -> Held:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Held(Extent(start, start + len(tensor), len(tensor) if whole is None else whole, dtype), tensor)


@dataclass
class Carriage:
    """What one layer sends and gets.

    Attributes:
        where: the layer in words.
        slots: what this rank holds in each slot.
        counts: as in `LayerParts`.
        copies: those that this rank takes part in.
        arriving: for each copy that it gets, where it belongs and what it is.
        received: bytes of them that come from other ranks.
    """

    where: str
    slots: Sequence[Mapping[str, Held]]
    counts: frozenset[tuple[str, float]]
    copies: Sequence[Copy] = ()
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    received: int = 0

    @property
    def parts(self) -> LayerParts:
        """What this rank holds, in words that other ranks understand."""
        return LayerParts([{name: held.extent for name, held in slot.items()} for slot in self.slots], self.counts)

    def make_room(self, rank: int) -> None:
        """Take the memory for what arrives at a rank."""
        for copy in self.copies:
            if copy.target == rank:
                place = self.slots[copy.target_slot][copy.name].part(copy)
                self.arriving.append((place, torch.empty_like(place)))

    def begin(self, peers: PeerGroup) -> Exchange:
        """Begin to bring what belongs on this rank into memory of its own; it is there when the exchange is over."""
        sends, receives = [], []
        buffers = iter([buffer for _, buffer in self.arriving])
        number_of: Counter[tuple[int, int]] = Counter()
        for copy in self.copies:
            pair = copy.source, copy.target
            number_of[pair] += 1
            if copy.source != peers.rank:
                receives.append(Message(copy.source, number_of[pair], next(buffers)))
                continue
            leaving = self.slots[copy.source_slot][copy.name].part(copy)
            if copy.target == peers.rank:
                next(buffers).copy_(leaving)
            else:
                sends.append(Message(copy.target, number_of[pair], leaving))
        self.received = sum(message.tensor.nbytes for message in receives)
        return peers.begin(sends, receives, f"moving homes of {self.where}")

    def put_in_place(self) -> None:
        """Overwrite what was there, in place: buffers of gradients and optimizers go on with the same memory.

        Autograd is told, so that a backward pass that still needs what was there is refused.
        """
        with torch.no_grad():
            for place, buffer in self.arriving:
                place.copy_(buffer)

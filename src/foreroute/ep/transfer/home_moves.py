"""Experts that change their home between two steps: parameters and optimizer state go from rank to rank.

There are four votes, and behind each of them all ranks go on or none does: the new homes are compared
(`agree_on_homes`), what is there is inspected, memory is taken, and segments are received into it, beside what is there
(`move_layers`). Only then is anything of the model written. `inspect_stacked` is for experts that are rows of stacked
parameters; a framework with others inspects its own.

Axis letters: L routed layers, E experts, G expert-parallel ranks, D expert-data-parallel ranks of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.optim import Optimizer

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.peers import Message, PeerGroup, gather_objects
from foreroute.ep.transfer.segments import (
    Extent,
    LayerExtents,
    Move,
    Segment,
    require_complete,
    segments_for,
)
from foreroute.ep.transfer.transfers import Transfer
from foreroute.errors import PlanError, TransferError
from foreroute.files.container import blake2b_hex
from foreroute.plan.topology import check_homes

WHAT = "homes cannot be moved, and none were"
"""The votes, for errors: until the last of them nothing of the model is written."""


class MovingRanks(NamedTuple):
    """The ranks between which experts can move: those with the same layers and the same cut of each expert."""

    peers: PeerGroup
    number_GD: NDArray[np.int64]  # the number among them of each expert-data-parallel rank of each expert-parallel one


def agree_on_homes(
    consensus: RankConsensus,
    before_LE: NDArray[np.integer],
    given_LE: ArrayLike,
    num_ranks: int,
    objection: str | None = None,
) -> NDArray[np.int16]:
    """Return the new homes, checked and the same on all ranks, or raise `PlanError` on all of them. A collective call.

    `objection` is what else is wrong on this rank.
    """
    with consensus.agree(WHAT, PlanError) as vote:
        if objection is not None:
            raise PlanError(objection)
        try:
            homes_LE = check_homes(given_LE, before_LE.shape[0], before_LE.shape[1], num_ranks).copy()
        except ValueError as error:  # numpy's too, for rows of other lengths
            raise PlanError(str(error)) from error
        vote.same(
            blake2b_hex(np.stack([before_LE, homes_LE]).astype(np.int16)),
            "ranks are given other homes to move experts to ({}, by their digests); give every rank the same",
        )
    return homes_LE


def move_layers(
    consensus: RankConsensus,
    ranks: MovingRanks | None,  # None on a rank without a layer that changes
    moves: Sequence[Sequence[Move]],  # of each layer of this rank that changes
    inspect: Callable[[], list[MovingLayer]],  # finds what those layers hold, without a change; may raise
) -> int:
    """Bring everything to its rank, beside what is there, and then overwrite that. Returns the bytes from other ranks.

    A collective call of all ranks, those between which nothing moves too, behind `agree_on_homes`.
    """
    with consensus.agree(WHAT, TransferError):
        moving = inspect()
    extents = [] if ranks is None else gather_objects([layer.extents for layer in moving], ranks.peers.group, WHAT)
    with consensus.agree(WHAT, TransferError):
        for number, layer in enumerate(moving):
            assert ranks is not None, "layers that change have ranks that hold them"
            of_ranks = [each[number] for each in extents]
            require_complete(of_ranks, ranks.number_GD, layer.where)
            layer.allocate(ranks.peers.rank, segments_for(ranks.peers.rank, moves[number], ranks.number_GD, of_ranks))
    with consensus.agree(WHAT, TransferError):
        transfers = []
        if ranks is not None:
            if moving:
                ranks.peers.connect(moving[0].device)
            transfers = [layer.post(ranks.peers) for layer in moving]
        # all are posted before one is waited for: a rank that fails has sent what others wait for
        for transfer in transfers:
            transfer.wait()
    for layer in moving:
        layer.commit()
    return sum(transfer.direct_bytes for transfer in transfers)


def local_experts(tensor: Tensor) -> Tensor:
    """[E / G, ...], this rank's part of a parameter, or of what an optimizer keeps of one, in the same memory."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def inspect_stacked(where: str, home: Mapping[str, Tensor], optimizer: Optimizer | None) -> MovingLayer:
    """Find the rows of a shard, and of all state that has a row for each expert, or raise `TransferError`.

    Every state tensor of a parameter whose first dimension counts the shard's experts moves with it (moments of Adam,
    momentum, factored moments); state without dimensions (step counts) is that of all experts and stays.

    Args:
        where: in words, for errors.
        home: name -> [E / G, ...], this rank's shard, or the DTensor that it is of.
        optimizer: of the shards, of one kind on all ranks; None when they are not trained.
    """
    trained = () if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    tensors = {name: local_experts(shard) for name, shard in home.items()}
    num_rows = len(next(iter(tensors.values())))
    for name, shard in home.items():
        if shard.grad is not None:
            raise TransferError(f"{name} of {where} has a gradient; call zero_grad(set_to_none=True) first")
        if optimizer is None:
            continue
        if shard.requires_grad and id(shard) not in trained:
            raise TransferError(f"{name} of {where} is no parameter of the optimizer; pass the parameters themselves")
        for key, value in optimizer.state.get(shard, {}).items():
            if not isinstance(value, Tensor) or not value.dim():
                continue
            rows = local_experts(value)
            if len(rows) != num_rows:
                raise TransferError(
                    f"{name}, {key} of {where} has shape {tuple(value.shape)}, expected {num_rows} rows, one for "
                    "each expert. Keep the homes, or use an optimizer with state of the parameter's shape"
                )
            tensors[f"{name}, {key}"] = rows
    # an expert that does not lie in one piece moves as a copy
    copies = {name: rows.contiguous() for name, rows in tensors.items() if not rows[0].is_contiguous()}
    rows_held = [
        {name: HeldTensor.of(rows[row].view(-1)) for name, rows in {**tensors, **copies}.items()}
        for row in range(num_rows)
    ]
    return MovingLayer(where, rows_held, copies=[(tensors[name], copy) for name, copy in copies.items()])


class HeldTensor(NamedTuple):
    """The part of one tensor of an expert that this rank holds."""

    extent: Extent
    tensor: Tensor  # flat, in the memory that the model or the optimizer uses

    @classmethod
    def of(cls, tensor: Tensor, start: int = 0, whole: int | None = None) -> HeldTensor:
        """Hold a flat tensor, elements from `start` on of one of `whole` elements; all of it by default."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(Extent(start, start + len(tensor), len(tensor) if whole is None else whole, dtype), tensor)

    def part(self, segment: Segment) -> Tensor:
        """Return the elements of a segment, as a view."""
        return self.tensor[segment.start - self.extent.start : segment.stop - self.extent.start]


@dataclass
class MovingLayer:
    """Weights that one layer holds here, sends and receives."""

    where: str  # in words
    rows: list[dict[str, HeldTensor]]  # of the expert in each row of the shard, by name
    counts: frozenset[tuple[str, float]] = frozenset()  # as in `LayerExtents`
    copies: Sequence[tuple[Tensor, Tensor]] = ()  # what is not in one piece, and the copy of it that is in `rows`
    segments: Sequence[Segment] = ()  # those that this rank sends or receives
    # for each segment that it receives, where it belongs, and the memory that it arrives in
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def extents(self) -> LayerExtents:
        """Extents that this rank tells the others."""
        return LayerExtents([{name: held.extent for name, held in row.items()} for row in self.rows], self.counts)

    @property
    def device(self) -> torch.device:
        return next(held.tensor.device for row in self.rows for held in row.values())

    def allocate(self, rank: int, segments: Sequence[Segment]) -> None:
        """Take the memory for the segments that arrive at this rank, whose number among the peers is `rank`."""
        self.segments = segments
        for segment in segments:
            if segment.target == rank:
                target = self.rows[segment.target_row][segment.name].part(segment)
                self.staged.append((target, torch.empty_like(target)))

    def post(self, peers: PeerGroup) -> Transfer:
        """Begin to bring what belongs on this rank into memory of its own. A collective call."""
        sends: list[Message] = []
        receives: list[Message] = []
        buffers = iter([buffer for _, buffer in self.staged])
        # both ends list the segments of a pair of ranks in the same order, so a count tells a message from the others
        number_of: Counter[tuple[int, int]] = Counter()
        for segment in self.segments:
            pair = segment.source, segment.target
            number_of[pair] += 1
            if segment.source != peers.rank:
                receives.append((segment.source, number_of[pair], next(buffers)))
                continue
            leaving = self.rows[segment.source_row][segment.name].part(segment)
            if segment.target == peers.rank:
                next(buffers).copy_(leaving)
            else:
                sends.append((segment.target, number_of[pair], leaving))
        return Transfer(peers, f"moving homes of {self.where}", sends, receives).post()

    def commit(self) -> None:
        """Overwrite what was there, in place: buffers of gradients and optimizers go on with the same memory."""
        # under no_grad it still raises the version counters, so a backward pass that needs what was there is refused
        with torch.no_grad():
            for target, buffer in (*self.staged, *self.copies):
                target.copy_(buffer)

"""Experts that change their home between two steps: parameters and optimizer state go from rank to rank.

There are four collective stages, and after each of them all ranks go on or none does: the new homes are compared, what
is there is inspected, memory is taken, and segments are received into it, beside what is there. Only then is anything
of the model written. `move_homes` is for experts that are rows of stacked parameters; what others have to do is to
inspect their experts, and the stages are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.optim import Optimizer

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.moves import Moves, shard_moves
from foreroute.ep.transfer.peers import PeerGroup, collective_errors
from foreroute.ep.transfer.segments import HeldTensor, LayerTransfer, require_complete, segments_for
from foreroute.errors import PlanError, TransferError
from foreroute.files.container import blake2b_hex
from foreroute.planner.homes import check_homes

WHAT = "moving homes"
"""The call, for errors."""
Done = TypeVar("Done")


@dataclass(frozen=True, eq=False)
class MovingRanks:
    """The ranks between which experts can move: those with the same layers and the same cut of each expert.

    Attributes:
        peers: the ranks.
        group: of the same, in their order, for what they say.
        number_GD: int64 [G, D], the number among them of each expert-data-parallel rank of each expert-parallel one.
    """

    peers: PeerGroup
    group: dist.ProcessGroup
    number_GD: NDArray[np.int64]


def move_homes(
    peers: PeerGroup,
    consensus: RankConsensus,
    before_LE: NDArray[np.integer],
    after_LE: ArrayLike,
    homes: Sequence[Mapping[str, Tensor]],
    optimizer: Optimizer | None = None,
) -> int:
    """Move experts to their new homes, in place. A collective call, between two steps and after `zero_grad`.

    Every state tensor of a parameter whose first dimension counts the shard's experts moves with it (moments of Adam,
    momentum, factored moments); state without dimensions (step counts) is that of all experts and stays. A shard that
    is not trained has no state.

    Args:
        peers: the ranks of the homes, in their order.
        consensus: of the same ranks.
        before_LE: integers [L, E], home ranks so far.
        after_LE: integers [L, E], home ranks from now on.
        homes: per routed layer, name -> [E / G, ...], this rank's shard, experts in ascending order of their id; or the
            DTensor that it is of.
        optimizer: of the shards, of one kind on all ranks; None when they are not trained.

    Returns:
        Bytes that this rank received.

    Raises:
        PlanError: on every rank alike, when homes are not E / G experts on each rank, or ranks are given other homes.
        TransferError: on every rank alike, when a shard has a gradient, or state that cannot be cut into experts, when
            ranks hold different state, or a rank is gone; nothing has moved then.
    """
    moved_LE = agree_on_homes(consensus, before_LE, after_LE, peers.size)
    layers = np.flatnonzero((before_LE != moved_LE).any(axis=1)).tolist()
    trained = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    transfers = all_or_none(
        consensus, lambda: [_inspect(f"routed layer {layer}", homes[layer], optimizer, trained) for layer in layers]
    )
    ranks = MovingRanks(peers, consensus.group, np.arange(peers.size)[:, None])
    moves = [shard_moves(before_LE[layer], moved_LE[layer]) for layer in layers]
    received = bring(consensus, ranks, transfers, moves)
    for transfer in transfers:
        transfer.commit()
    return received


def local_experts(tensor: Tensor) -> Tensor:
    """[E / G, ...], this rank's part of a parameter, or of what an optimizer keeps of one, in the same memory."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _inspect(
    where: str, home: Mapping[str, Tensor], optimizer: Optimizer | None, trained: set[int] | None
) -> LayerTransfer:
    """The rows of a shard, and of all state that has a row for each expert."""
    tensors = {name: local_experts(shard) for name, shard in home.items()}
    num_rows = len(next(iter(tensors.values())))
    for name, shard in home.items():
        if shard.grad is not None:
            raise TransferError(f"{name} of {where} has a gradient; call zero_grad(set_to_none=True) first")
        if optimizer is None or trained is None:
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
    slots = [
        {name: HeldTensor.of(rows[row].view(-1)) for name, rows in {**tensors, **copies}.items()}
        for row in range(num_rows)
    ]
    return LayerTransfer(where, slots, copies=[(tensors[name], copy) for name, copy in copies.items()])


def agree_on_homes(
    consensus: RankConsensus,
    before_LE: NDArray[np.integer],
    given_LE: ArrayLike,
    num_ranks: int,
    objection: str | None = None,
) -> NDArray[np.int16]:
    """The new homes, checked, the same on all ranks. A collective call.

    Args:
        consensus: of all ranks.
        before_LE: integers [L, E], home ranks so far.
        given_LE: integers [L, E], home ranks from now on.
        num_ranks: G, expert-parallel ranks.
        objection: what else is wrong on this rank, or None.

    Raises:
        PlanError: on every rank alike, when homes are not E / G experts on each rank, or ranks are given other homes.
    """
    homes_LE, refusal = np.asarray(before_LE, np.int16), None
    try:
        homes_LE = check_homes(given_LE, before_LE.shape[0], before_LE.shape[1], num_ranks)
    except ValueError as error:  # numpy's too, for rows of other lengths
        refusal = error
    mine = objection if refusal is None else str(refusal)
    if objections := consensus.objections(mine, WHAT):
        raise PlanError("homes cannot be moved: " + "; ".join(objections)) from refusal
    digests = consensus.texts(blake2b_hex(np.stack([before_LE, homes_LE]).astype(np.int16)), WHAT)
    if len(set(digests)) > 1:
        listed = "; ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
        raise PlanError(
            f"ranks are given other homes to move experts to ({listed}, by their digests); give every rank the same"
        )
    return homes_LE


def bring(
    consensus: RankConsensus, ranks: MovingRanks | None, transfers: list[LayerTransfer], moves: list[Moves]
) -> int:
    """Bring everything to its rank, beside what is there. A collective call.

    Args:
        consensus: of all ranks, those between which nothing moves too.
        ranks: between which experts move; None on a rank without a layer that changes.
        transfers: of the layers that change, with what there is.
        moves: of the same layers.

    Returns:
        The bytes that came from other ranks.

    Raises:
        TransferError: on every rank alike, when ranks hold different state, or one cannot receive its own.
    """
    said: list[Any] = [] if ranks is None else gathered([transfer.parts for transfer in transfers], ranks.group)

    def prepare() -> None:
        for number, transfer in enumerate(transfers):
            assert ranks is not None, "layers that change have ranks that hold them"
            of_ranks = [each[number] for each in said]
            require_complete(of_ranks, ranks.number_GD, transfer.where)
            transfer.segments = segments_for(ranks.peers.rank, moves[number], ranks.number_GD, of_ranks)
            transfer.allocate(ranks.peers.rank)

    def exchange() -> None:
        # all are posted before one is waited for: a rank that fails has sent what others wait for
        for exchange in [transfer.begin(ranks.peers) for transfer in transfers if ranks is not None]:
            exchange.wait()

    all_or_none(consensus, prepare)
    all_or_none(consensus, exchange)
    return sum(transfer.received for transfer in transfers)


def all_or_none(consensus: RankConsensus, do: Callable[[], Done]) -> Done:
    """Do something on every rank, and raise the same `TransferError` on all of them if one could not."""
    problem = None
    try:
        done = do()
    except RuntimeError as error:  # out of memory, too
        problem = error
    if objections := consensus.objections(None if problem is None else str(problem), WHAT):
        raise TransferError("homes cannot be moved, and none were: " + "; ".join(objections)) from problem
    return done


def gathered(mine: object, group: dist.ProcessGroup) -> list[Any]:
    """What each rank says, by its number in the group."""
    said: list[Any] = [None] * dist.get_world_size(group)
    with collective_errors(WHAT, group):
        dist.all_gather_object(said, mine, group=group)
    return said

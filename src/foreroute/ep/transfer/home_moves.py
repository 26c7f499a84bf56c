"""Experts that change their home between two steps: rows of parameters and of optimizer state go from rank to rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.optim import Optimizer

from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.moves import Moves, shard_moves
from foreroute.ep.transfer.peers import PeerGroup, RowMoves, post
from foreroute.errors import PlanError, TransferError
from foreroute.files import blake2b_hex
from foreroute.planner.homes import check_homes

WHAT = "moving homes"
"""The call, for errors."""


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
    momentum, factored moments); state without dimensions (step counts) is that of all experts and stays.

    Args:
        peers: the ranks of the homes, in their order.
        consensus: of the same ranks.
        before_LE: integers [L, E], home ranks so far.
        after_LE: integers [L, E], home ranks from now on.
        homes: per routed layer, name -> [E / G, ...], this rank's shard, experts in ascending order of their id.
        optimizer: of the shards, of one kind on all ranks; None when they are not trained.

    Returns:
        Bytes that this rank received.

    Raises:
        PlanError: on every rank alike, when homes are not E / G experts on each rank, or ranks are given other homes.
        TransferError: on every rank alike, when a shard has a gradient, or state that cannot be cut into experts, or
            when ranks hold different state; nothing has moved then. When a rank is gone.
    """
    after_LE = _agreed_homes(consensus, before_LE, after_LE)
    moves_L = [shard_moves(before, after) for before, after in zip(before_LE, after_LE, strict=True)]
    tensors_L = [_with_state(home, optimizer) for home in homes]
    _agree(consensus, tensors_L, homes, optimizer)
    received = 0
    for layer, (moves, tensors) in enumerate(zip(moves_L, tensors_L, strict=True)):
        if len(moves):
            received += _move(peers, moves, tensors, f"moving homes of routed layer {layer}")
    return received


def _agreed_homes(consensus: RankConsensus, before_LE: NDArray[np.integer], after_LE: ArrayLike) -> NDArray[np.integer]:
    """The new homes, checked, the same on all ranks."""
    homes_LE, refusal = before_LE, None
    try:
        homes_LE = check_homes(after_LE, before_LE.shape[0], before_LE.shape[1], consensus.size)
    except ValueError as error:  # numpy's too, for rows of other lengths
        refusal = error
    if objections := consensus.objections(None if refusal is None else str(refusal), WHAT):
        raise PlanError("homes cannot be moved: " + "; ".join(objections)) from refusal
    both = np.stack([before_LE, homes_LE]).astype(np.int16)
    digests = consensus.texts(blake2b_hex(both), WHAT)
    if len(set(digests)) > 1:
        listed = "; ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
        raise PlanError(
            f"ranks are given other homes to move experts to ({listed}, by their digests); give every rank the same"
        )
    return homes_LE


def _with_state(home: Mapping[str, Tensor], optimizer: Optimizer | None) -> dict[str, Tensor]:
    """The shard and all state tensors with a row for each expert."""
    tensors = dict(home)
    if optimizer is not None:
        for name, shard in home.items():
            for key, value in optimizer.state.get(shard, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    tensors[f"{name}, {key}"] = value
    return tensors


def _agree(
    consensus: RankConsensus,
    tensors_L: list[dict[str, Tensor]],
    homes: Sequence[Mapping[str, Tensor]],
    optimizer: Optimizer | None,
) -> None:
    mine = _untrained(homes, optimizer) or _objection(tensors_L, homes)
    if objections := consensus.objections(mine, WHAT):
        raise TransferError("homes cannot be moved: " + "; ".join(objections))
    kinds = sorted(
        {(n, tuple(t.shape), str(t.dtype), t.device.type) for tensors in tensors_L for n, t in tensors.items()}
    )
    per_layer = [sorted(tensors) for tensors in tensors_L]
    texts = consensus.texts(f"{blake2b_hex(repr((kinds, per_layer)).encode())} {kinds}", WHAT)
    if len(set(texts)) > 1:
        raise TransferError(
            "ranks hold different state beside their experts, so rows cannot be moved: "
            + "; ".join(f"rank {rank} has {text.partition(' ')[2]}" for rank, text in enumerate(texts))
            + ". Step the optimizer on all ranks or on none before the first move"
        )


def _untrained(homes: Sequence[Mapping[str, Tensor]], optimizer: Optimizer | None) -> str | None:
    if optimizer is None:
        return None
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for layer, home in enumerate(homes):
        for name, shard in home.items():
            if id(shard) not in trained:
                return (
                    f"{name} of routed layer {layer} is no parameter of the optimizer; pass the parameters themselves"
                )
    return None


def _objection(tensors_L: list[dict[str, Tensor]], homes: Sequence[Mapping[str, Tensor]]) -> str | None:
    for layer, (tensors, home) in enumerate(zip(tensors_L, homes, strict=True)):
        num_rows = len(next(iter(home.values())))
        for name, tensor in tensors.items():
            if tensor.grad is not None:
                return f"{name} of routed layer {layer} has a gradient; call zero_grad(set_to_none=True) first"
            if len(tensor) != num_rows:
                return (
                    f"{name} of routed layer {layer} has shape {tuple(tensor.shape)}, expected {num_rows} rows, one "
                    "for each expert. Keep the homes, or use an optimizer with state of the parameter's shape"
                )
    return None


@torch.no_grad()
def _move(peers: PeerGroup, moves: Moves, tensors: dict[str, Tensor], what: str) -> int:
    rank, is_local_V = peers.rank, moves.source_V == moves.target_V
    arriving = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    local = moves.take(is_local_V & (moves.source_V == rank))
    for source_row, target_row in zip(local.source_row_V.tolist(), local.target_row_V.tolist(), strict=True):
        for name, tensor in tensors.items():
            arriving[name][target_row] = tensor[source_row]
    sent, taken = moves.take(~is_local_V).ends(rank)
    post(peers, RowMoves(sent, "row"), tensors, RowMoves(taken, "row"), arriving, what).wait()
    from_afar_V = taken["row"].astype(np.int64)
    rows = torch.from_numpy(np.concatenate([local.target_row_V, from_afar_V]))
    received = 0
    for name, tensor in tensors.items():
        there = rows.to(tensor.device)
        tensor[there] = arriving[name][there]
        received += len(from_afar_V) * tensor[0].numel() * tensor.element_size()
    return received

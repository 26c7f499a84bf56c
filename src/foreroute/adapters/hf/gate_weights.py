"""What a router hands on as the weight of each pick: noted, and replaced where a replay says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foreroute.adapters.hf.passes import LayerPass, Seat
from foreroute.errors import ReplayError


def with_gate_weights(seat: Seat, output: Any, now: LayerPass) -> Any:
    """What a router returned, with the weights to force in the slots that have a route.

    Whatever the model does with the weights afterwards, it does to forced ones as well: they are recorded and put back
    at the same place. In forced slots they are constants.

    Raises:
        ReplayError: when gate weights are recorded or replayed, and the router does not hand on one for each pick.
    """
    wanted = None if now.notes is None else now.notes.weights_RK
    forced_LRK = None if now.rows is None else now.rows.weights_LRK
    if wanted is None and forced_LRK is None:
        return output
    place, own = _weights_in(seat, output, now)
    if forced_LRK is not None and now.rows is not None:
        forced = forced_LRK[0].to(own.device, own.dtype).view(own.shape)
        routed = now.rows.routed_R.to(own.device).view(*own.shape[:-1], 1)
        own = torch.where(routed, forced, own)
        output = own if place is None else _put(output, place, own)
    if wanted is not None:
        wanted.copy_(own.detach().reshape(wanted.shape))
    return output


def _weights_in(seat: Seat, output: Any, now: LayerPass) -> tuple[int | None, Tensor]:
    """Which part of the output holds the weights (None: all of it), and they."""
    parts = list(enumerate(output)) if isinstance(output, tuple | list) else [(None, output)]
    top_k = now.top_k
    found = [
        (place, part)
        for place, part in parts
        if isinstance(part, Tensor)
        and part.is_floating_point()
        and part.numel() == now.num_slots * top_k
        and part.shape[-1] == top_k
    ]
    if len(found) != 1 or seat.regroups:
        handed = f"hands on {len(found) or 'no'} tensors of one number per pick"
        what = "regroups its picks" if seat.regroups else handed
        raise ReplayError(
            f"router {seat.path} {what}; expected one tensor of gate weights [tokens, K]. The gate weights of this "
            "family can be neither recorded nor replayed; leave gate_weights out"
        )
    return found[0]


def _put(output: Any, place: int, weights: Tensor) -> Any:
    parts = [weights if number == place else part for number, part in enumerate(output)]
    if hasattr(output, "_fields"):
        return type(output)(*parts)
    return type(output)(parts)

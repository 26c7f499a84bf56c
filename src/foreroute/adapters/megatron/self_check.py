"""The safety net of `attach`: on each router alone, replay must be invisible on its own routes and obeyed on others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from foreroute.adapters.megatron.discover import RouterSite
from foreroute.adapters.megatron.passes import LayerPass
from foreroute.adapters.megatron.seat import Seat
from foreroute.errors import AttachError, ReplayError
from foreroute.replay import LayerNotes, ReplayRows

ROWS = 8


def self_check(site: RouterSite) -> None:
    """Run the router as it is, watched, on its own routes, and on other routes.

    Raises:
        AttachError: when replay changes what it should not, or does not change what it should.
    """
    router = site.module
    with _untouched(site):
        hidden = _moderate(torch.randn(ROWS, 1, router.config.hidden_size).to(router.weight), router.weight)
        native = _route(site, hidden)
        seen_RK = torch.zeros(ROWS, router.topk, dtype=torch.int64, device=hidden.device)
        watched = _route(site, hidden, LayerPass(None, _noting(seen_RK), None, "native"))
        own = _route(site, hidden, _forcing(seen_RK))
        other_RK = (seen_RK + 1) % router.num_experts
        other = _route(site, hidden, _forcing(other_RK))
    for what, result in (("watching it", watched), ("replaying its own routes", own)):
        if not all(torch.equal(a, b) for a, b in zip(native, result, strict=True)):
            raise AttachError(
                f"self-check failed: {what} changed what router {site.path} hands on; something replaced a part of it"
            )
    _require_obeyed(site, other, other_RK)


def _require_obeyed(site: RouterSite, handed_on: tuple[Tensor, Tensor], wanted_RK: Tensor) -> None:
    probs, routing_map = handed_on
    wanted = torch.zeros_like(routing_map, dtype=torch.bool).scatter(1, wanted_RK, True)
    if not torch.equal(routing_map.bool(), wanted):
        raise AttachError(
            f"self-check failed: router {site.path} was told to pick other experts and did not; a fused or replaced "
            "selection bypasses replay"
        )
    if bool((probs[wanted] == 0).any()) or not bool(probs.isfinite().all()):
        raise AttachError(
            f"self-check failed: router {site.path} gave weight zero, or none that is finite, to an expert that it was "
            "told to pick, as if its scores had been masked first"
        )


def _route(site: RouterSite, hidden: Tensor, now: LayerPass | None = None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)  # input jitter draws numbers
    seat = Seat(site, 0)
    seat.now = now
    try:
        with nullcontext() if now is None else seat.taken(lambda position: None):
            # its hooks are not for rows of ours: those of DDP would begin to gather parameters
            probs, routing_map = site.module.forward(hidden)
    except ReplayError as error:
        raise AttachError(f"self-check failed: {error}") from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise AttachError(
            f"self-check failed: router {site.path} does not run by itself ({type(error).__name__}: {error}); attach "
            "when its weights are in place, and before FSDP shards them"
        ) from error
    return probs, routing_map


def _moderate(hidden: Tensor, weight: Tensor) -> Tensor:
    """Rows for which logits are of the order of one: the softmax of a confident router may underflow to zero."""
    largest: float = weight.detach().float().norm(dim=-1).max().item()
    return hidden / max(1.0, largest)


def _noting(ids_RK: Tensor) -> LayerNotes:
    return LayerNotes(ids_RK, None, None, None, None)


def _forcing(ids_RK: Tensor) -> LayerPass:
    every = np.ones(len(ids_RK), np.bool_)
    return LayerPass(ReplayRows.from_host(ids_RK[None], every, every, every, ids_RK.device), None, None, "native")


@contextmanager
def _untouched(site: RouterSite) -> Iterator[None]:
    """Eval mode, no gradients; random state and mode kept."""
    router = site.module
    training, jitter = router.training, router.input_jitter
    router.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(0)
            yield
    finally:
        router.train(training)
        router.input_jitter = jitter

"""Attaching to a model: find its routers, learn from a small forward what they select, and prove replay on it."""

from __future__ import annotations

from torch import nn

from . import recompute
from .errors import AttachError
from .find import RouterSite, find_routers, probe
from .hooks import is_hooked
from .prove import self_check, untouched
from .routed import Routed, TrunkHooks


def attach(model: nn.Module) -> Routed:
    """Make the routing of a model recordable and replayable as tensors, and prove it by four small forwards.

    The model is left as it was.

    Args:
        model: with routers that are modules of their own, such as those of transformers; on any device, in any dtype.

    Raises:
        AttachError: when it has no routers, is known not to be replayable, or does not pass the self-check. The message
            says which router and why.
        ReplayError: when this release of torch keeps what activation checkpoints run again in an unknown place.
    """
    require_attachable(model)
    candidates = find_routers(model)
    with untouched(model):
        seen = probe(model, candidates)
        by_stack: dict[str, list[RouterSite]] = {}
        for site in seen.sites:
            by_stack.setdefault(stack_of(site), []).append(site)
        stacks = [
            TrunkHooks(number, seen.trunk_of(sites), seen.hooks_of(sites))
            for number, sites in enumerate(by_stack.values())
        ]
        self_check(Routed(model, stacks), list(by_stack.values()))
    return Routed(model, stacks)


def require_attachable(model: object) -> None:
    """Raise `AttachError` for what is no model, or has a session open, and `ReplayError` as `recompute.prove`."""
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"attach was given an object of the class {type(model).__name__}; expected a model, a torch.nn.Module"
        )
    if any(is_hooked(module) for module in model.modules()):
        raise AttachError("a session is open on this model; attach it before or after, or use the one that it has")
    recompute.prove()


def stack_of(site: RouterSite) -> str:
    """Whether a router is in an encoder or a decoder, which are given different tokens; empty where a model has one."""
    return next((part for part in site.path.split(".") if part in ("encoder", "decoder")), "")

"""Attaching to a model: find its routers, learn from a small forward what they select, and prove replay on it.

Replay is proven by three small forwards: of the model as it is, on its own routes, and on other routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import recompute
from .errors import AttachError, ReplayError
from .find import RouterSite, find_routers, hidden, probe
from .hooks import is_hooked, overridden
from .routed import Routed, TrunkHooks

PLAIN = (bool, int, float, str, Tensor, type(None))


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


def self_check(routed: Routed, sites: Sequence[Sequence[RouterSite]]) -> None:
    """Run the model three times: as it is, on its own routes, and on other routes.

    Replay must be invisible on a model's own routes and obeyed on others. The check looks at what the routers hand on
    and at what the experts are handed, not at what we put in. It sees a selection that is not obeyed, a gate weight
    taken from scores that were zeroed outside the router's own choice, and experts that are fed by a router which was
    not found.

    Args:
        routed: the model.
        sites: its routers, by stack.

    Raises:
        AttachError: when replay changes what it should not, or does not change what it should.
    """
    try:
        own = _check_own_routes(routed)
        if any(router.top_k < router.num_experts for stack in routed.stacks for router in stack.routers):
            _check_other_routes(routed, sites, [_others(*each) for each in zip(routed.stacks, sites, own, strict=True)])
    except ReplayError as error:
        raise AttachError(f"self-check failed: {error}") from error


def _check_own_routes(routed: Routed) -> list[Tensor]:
    with routed.record() as recording:
        native = hidden(routed.model)
    own = [recording.ids(number)[0] for number in range(len(routed.stacks))]
    for stack, rows in zip(routed.stacks, routed.rows(own), strict=True):
        if bool(rows.faults.any()):
            raise AttachError(f"the routers of {type(stack.trunk).__name__} do not make K different picks of E experts")
    with routed.replay(own), routed.record() as recording:
        replayed = hidden(routed.model)
    same_routes = all(torch.equal(recording.ids(number)[0], ids) for number, ids in enumerate(own))
    # an output that differs from itself (noise, atomics on a GPU) cannot be compared bit by bit; routes still can
    if not same_routes or not (torch.equal(native, replayed) or not torch.equal(native, hidden(routed.model))):
        raise AttachError(
            f"self-check failed: replaying the model's own routes changed its output by up to "
            f"{(native - replayed).abs().max().item():.3g}; this family needs an adapter of its own"
        )
    return own


def _others(stack: Any, sites: Sequence[RouterSite], own_BTLK: Tensor) -> Tensor:
    """Each id moved to the next real expert; those of a lookup stay."""
    other = own_BTLK.clone()
    for layer, (router, site) in enumerate(zip(stack.routers, sites, strict=True)):
        if not site.rule.is_lookup and router.top_k < router.num_experts:
            num_real = router.num_experts - site.rule.num_skip_classes
            # not in the narrow type of ids, which may lack E itself
            other[:, :, layer, : router.top_k] = (own_BTLK[:, :, layer, : router.top_k].long() + 1) % num_real
    return other


def _check_other_routes(routed: Routed, sites: Sequence[Sequence[RouterSite]], other: list[Tensor]) -> None:
    handed_on: dict[str, Any] = {}

    def note(path: str, selecting: Any, *args: Any, **kwargs: Any) -> Any:
        handed_on[path] = selecting(*args, **kwargs)
        return handed_on[path]

    with ExitStack() as stack:
        stack.enter_context(routed.replay(other))
        for site in (site for of_stack in sites for site in of_stack):
            stack.enter_context(overridden(*site.selecting, partial(note, site.path)))
        experts = stack.enter_context(_ids_given_to_experts(routed.model))
        hidden(routed.model)
    forced: list[Tensor] = []
    for hooks, of_stack, ids_BTLK in zip(routed.stacks, sites, other, strict=True):
        for layer, (router, site) in enumerate(zip(hooks.routers, of_stack, strict=True)):
            forced_NK = ids_BTLK[0, :, layer, : router.top_k].long().cpu()
            forced.append(forced_NK)
            name = f"router {site.path} ({type(site.module).__name__})"
            output = handed_on[site.path]
            if not _obeyed(site, output, forced_NK, router.num_experts):
                raise AttachError(
                    f"self-check failed: {name} was told to pick other experts and its selection was not obeyed; this "
                    "family needs an adapter of its own"
                )
            if not _all_weighted(output, forced_NK, router.num_experts):
                raise AttachError(
                    f"self-check failed: {name} gave weight zero, or none that is finite, to an expert that it was "
                    "told to pick, as if its scores had been masked first; this family needs an adapter of its own"
                )
    for path, ids_NK in experts:
        if not any(torch.equal(ids_NK, forced_NK) for forced_NK in forced):
            raise AttachError(
                f"self-check failed: {path} was handed expert ids that are not those of any router found; something "
                "between routers and experts changes them, or a router has an unknown class name"
            )


def _obeyed(site: RouterSite, output: Any, forced_NK: Tensor, num_experts: int) -> bool:
    """Whether what a router hands on says the forced ids: as ids, as one-hot rows, or as gates over all experts."""
    if site.rule.read_back is not None:
        return torch.equal(site.rule.read_back(output).cpu(), forced_NK.sort(dim=-1).values)
    wanted_NE = torch.zeros(len(forced_NK), num_experts, dtype=torch.bool).scatter(-1, forced_NK, True)
    for part in _tensors(output):
        if not part.is_floating_point() and part.numel() == forced_NK.numel():
            if torch.equal(part.reshape(forced_NK.shape).long(), forced_NK):
                return True
        elif part.numel() == wanted_NE.numel() and torch.equal(part.reshape(wanted_NE.shape) != 0, wanted_NE):
            return True
    return False


def _all_weighted(output: Any, forced_NK: Tensor, num_experts: int) -> bool:
    """Whether no gate weight, where the router hands on one per pick, is zero or infinite."""
    if forced_NK.shape[-1] == num_experts:
        return True
    weights = [part for part in _tensors(output) if part.is_floating_point() and part.numel() == forced_NK.numel()]
    return all(bool(((part != 0) & part.isfinite()).all()) for part in weights)


def _tensors(output: Any) -> list[Tensor]:
    parts = output if isinstance(output, tuple | list) else [output]
    return [part.detach().cpu() for part in parts if isinstance(part, Tensor)]


@contextmanager
def _ids_given_to_experts(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """(path, int64 [R, K]) for every call of an experts module that takes ids."""
    given: list[tuple[str, Tensor]] = []

    def note(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.extend(
            (path, value.detach().cpu().long())
            for value in [*args, *kwargs.values()]
            if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.ndim == 2
        )

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if type(module).__name__.endswith("Experts"):
                stack.callback(module.register_forward_pre_hook(partial(note, path), with_kwargs=True).remove)
        yield given


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, nothing compiled; random state, flags, buffers and attributes of all modules kept."""
    before = [(module, _attributes(module), _buffers(module)) for module in model.modules()]
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(range(torch.cuda.device_count())),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for module, attributes, buffers in before:
            for name in _attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name, (buffer, values) in buffers.items():
                if module._buffers.get(name) is not buffer or not torch.equal(buffer, values):
                    module._buffers[name] = buffer
                    buffer.copy_(values)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of the instance: counters, caches, flags."""
    return {name: value for name, value in module.__dict__.items() if isinstance(value, PLAIN)}


def _buffers(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Buffers of the module itself, with copies of their values."""
    return {name: (buffer, buffer.clone()) for name, buffer in module._buffers.items() if buffer is not None}

"""The safety net of `attach`: replay must be invisible on a model's own routes and obeyed on others.

It looks at what the routers hand on and at what the experts are handed, not at what we put in. It sees a selection
that is not obeyed, a gate weight taken from scores that were zeroed outside the router's own choice, and experts that
are fed by a router which was not found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreroute.adapters.hf.discover import RouterSite
from foreroute.adapters.hf.model import RoutedModel
from foreroute.adapters.hf.probe import hidden
from foreroute.adapters.overriding import overridden
from foreroute.errors import AttachError, TraceContentError
from foreroute.trace import RoutingTrace


def self_check(routed: RoutedModel, sites: list[RouterSite]) -> None:
    """Run the model three times: as it is, on its own routes, and on other routes.

    Raises:
        AttachError: when replay changes what it should not, or does not change what it should.
    """
    own = _check_own_routes(routed)
    other = _other_routes(own, sites)
    if other is not None:
        _check_other_routes(routed, sites, other)


def _check_own_routes(routed: RoutedModel) -> RoutingTrace:
    with routed.record() as recording:
        native = hidden(routed.model)
    try:
        own = recording.trace()
    except TraceContentError as error:
        raise AttachError(f"the routers do not make K different picks of E experts: {error}") from error
    with routed.replay(own), routed.record() as recording:
        replayed = hidden(routed.model)
    same_routes = recording.trace().equals(own)
    # an output that differs from itself (noise, atomics on a GPU) cannot be compared bit by bit; routes still can
    if not same_routes or not (torch.equal(native, replayed) or not torch.equal(native, hidden(routed.model))):
        raise AttachError(
            f"self-check failed: replaying the model's own routes changed its output by up to "
            f"{(native - replayed).abs().max().item():.3g}; this family needs an adapter of its own"
        )
    return own


def _other_routes(trace: RoutingTrace, sites: list[RouterSite]) -> RoutingTrace | None:
    """Each id moved to the next real expert; None where all experts are always picked."""
    spec = trace.spec
    if spec.top_k == spec.num_experts:
        return None
    ids = trace.expert_ids_NLK.astype(np.int64)
    for layer, site in enumerate(sites):
        if not site.plan.is_lookup:
            ids[:, layer] = (ids[:, layer] + 1) % (spec.num_experts - site.plan.num_skip_classes)
    return RoutingTrace.from_sequences(spec, [trace.tokens(0)], [ids])


def _check_other_routes(routed: RoutedModel, sites: list[RouterSite], other: RoutingTrace) -> None:
    handed_on: dict[str, Any] = {}

    def note(path: str, selecting: Any, *args: Any, **kwargs: Any) -> Any:
        handed_on[path] = selecting(*args, **kwargs)
        return handed_on[path]

    with ExitStack() as stack:
        stack.enter_context(routed.replay(other))
        for site in sites:
            stack.enter_context(overridden(*site.selecting, partial(note, site.path)))
        experts = stack.enter_context(_ids_given_to_experts(routed.model))
        hidden(routed.model)
    forced_LNK = torch.from_numpy(other.expert_ids_NLK.astype(np.int64)).transpose(0, 1)
    for site, forced_NK in zip(sites, forced_LNK, strict=True):
        name = f"router {site.path} ({type(site.module).__name__})"
        output = handed_on[site.path]
        if not _obeyed(site, output, forced_NK, other.spec.num_experts):
            raise AttachError(
                f"self-check failed: {name} was told to pick other experts and its selection was not obeyed; this "
                "family needs an adapter of its own"
            )
        if not _all_weighted(output, forced_NK, other.spec.num_experts):
            raise AttachError(
                f"self-check failed: {name} gave weight zero, or none that is finite, to an expert that it was told to "
                "pick, as if its scores had been masked first; this family needs an adapter of its own"
            )
    for path, ids_NK in experts:
        if not any(torch.equal(ids_NK, forced_NK) for forced_NK in forced_LNK):
            raise AttachError(
                f"self-check failed: {path} was handed expert ids that are not those of any router found; something "
                "between routers and experts changes them, or a router has an unknown class name"
            )


def _obeyed(site: RouterSite, output: Any, forced_NK: Tensor, num_experts: int) -> bool:
    """Whether what a router hands on says the forced ids: as ids, as one-hot rows, or as gates over all experts."""
    if site.plan.read_back is not None:
        return torch.equal(site.plan.read_back(output).cpu(), forced_NK.sort(dim=-1).values)
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

"""Attaching: find the routers, learn from a small forward what they select, and prove replay on this very model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foreroute.adapters.hf.discover import RouterSite, find_routers
from foreroute.adapters.hf.intercept import Interceptor
from foreroute.adapters.hf.model import RoutedModel
from foreroute.adapters.hf.probe import PROBE_TOKENS, Probe, probe
from foreroute.adapters.hf.self_check import self_check
from foreroute.adapters.overriding import is_hooked
from foreroute.errors import AttachError
from foreroute.trace import RoutingSpec

PLAIN = (bool, int, float, str, Tensor, type(None))


def attach(model: nn.Module) -> RoutedModel:
    """Make the routing of a Hugging Face MoE model recordable and replayable.

    Runs four forwards of 8 tokens in eval mode: one to see what each router selects, and three to prove that replaying
    a model's own routes changes no bit and that replaying other routes is obeyed. The model is left as it was.

    Args:
        model: a transformers model with routers (5.14 or newer), on any device, in any dtype. Of an encoder-decoder,
            one stack; of a speech model, the part that takes text.

    Raises:
        AttachError: when the model has no routers, is known not to be replayable, has routers of different shapes, or
            does not pass the self-check. The message says which router and why.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"attach was given an object of the class {type(model).__name__}; expected a model of transformers, which "
            "is a torch.nn.Module"
        )
    if any(is_hooked(module) for module in model.modules()):
        raise AttachError("a session is open on this model; attach it before or after, or use the one that it has")
    candidates = find_routers(model)
    _refuse_two_stacks(model, candidates)
    with _untouched(model):
        seen = probe(model, candidates)
        spec = _spec_of(model, seen)
        interceptor = Interceptor(
            model, seen.trunk, seen.sites, [len(selections) - 1 for selections in seen.seen], spec
        )
        routed = RoutedModel(model, spec, seen.sites, interceptor)
        self_check(routed, seen.sites)
    return routed


def _refuse_two_stacks(model: nn.Module, candidates: list[RouterSite]) -> None:
    stacks = {part for site in candidates for part in site.path.split(".") if part in ("encoder", "decoder")}
    if len(stacks) > 1:
        raise AttachError(
            f"{type(model).__name__} routes in an encoder and in a decoder, which are given different tokens; one "
            "trace has one sequence of tokens. Attach each stack on its own: attach(model.get_encoder())"
        )


def _spec_of(model: nn.Module, seen: Probe) -> RoutingSpec:
    finals = [(site, selections[-1]) for site, selections in zip(seen.sites, seen.seen, strict=True)]
    for site, final in finals:
        if len(final.ids_RK) != PROBE_TOKENS or final.ids_RK.ndim != 2:
            raise AttachError(
                f"router {site.path} selects on scores of shape {tuple(final.scores_RE.shape)}; "
                f"expected a row for each of {PROBE_TOKENS} tokens"
            )
    shapes = sorted({(final.scores_RE.shape[-1], final.ids_RK.shape[-1]) for _, final in finals})
    if len(shapes) > 1:
        raise AttachError(f"the routers differ in (experts, top-k): {shapes}; one trace holds one shape")
    layers = [site.layer for site in seen.sites]
    if len(set(layers)) != len(layers):
        twice = [site.path for site in seen.sites if layers.count(site.layer) > 1]
        raise AttachError(
            f"{type(model).__name__} routes more than once in one decoder layer ({', '.join(twice[:2])}); a trace "
            "names each layer once"
        )
    ((num_experts, top_k),) = shapes
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return RoutingSpec(num_experts, top_k, tuple(layers), model=str(name))


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
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

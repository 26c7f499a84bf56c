"""Attaching: find the routers, learn from a small forward what they select, and prove replay on this very model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreroute.adapters.hf.discover import RouterSite, find_routers, find_trunk
from foreroute.adapters.hf.intercept import Interceptor, overridden
from foreroute.adapters.hf.model import RoutedModel
from foreroute.adapters.hf.selection_mode import Selection, SelectionMode
from foreroute.errors import AttachError
from foreroute.trace import RoutingSpec, RoutingTrace

PROBE_TOKENS = 8


def attach(model: nn.Module) -> RoutedModel:
    """Make the routing of a Hugging Face MoE model recordable and replayable.

    Runs four forwards of 8 tokens in eval mode: one to see what each router selects, and three to prove that replaying
    a model's own routes changes no bit and that replaying other routes is obeyed. The model is left as it was.

    Args:
        model: a transformers model with routers (5.14 or newer), on any device, in any dtype.

    Raises:
        AttachError: when the model has no routers, routers of different shapes, or does not pass the self-check.
    """
    sites = find_routers(model)
    trunk = find_trunk(model, sites)
    with _quiet(model):
        seen = _probe(model, trunk, sites)
        spec = _spec_of(model, sites, seen)
        interceptor = Interceptor(model, trunk, sites, [len(selections) - 1 for selections in seen], spec)
        routed = RoutedModel(model, spec, sites, interceptor)
        own = _check_own_routes(routed, trunk)
        _check_other_routes(routed, trunk, sites, own)
    return routed


def _probe(model: nn.Module, trunk: nn.Module, sites: list[RouterSite]) -> list[list[Selection]]:
    """Every top-k of every router in one forward."""
    seen: list[list[Selection]] = [[] for _ in sites]

    def watch(layer: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with SelectionMode(final=None) as mode:
            result = forward(*args, **kwargs)
        seen[layer].extend(mode.seen)
        return result

    with ExitStack() as stack:
        for layer, site in enumerate(sites):
            stack.enter_context(overridden(site.module, "forward", _bind(watch, layer)))
        _output(model, _probe_tokens(trunk))
    for site, selections in zip(sites, seen, strict=True):
        if not selections:
            raise AttachError(
                f"router {site.path} ({type(site.module).__name__}) made no top-k selection in its forward; "
                "how it selects is not known, so replay would have no effect"
            )
    return seen


def _bind(watch: Any, layer: int) -> Any:
    return lambda forward, *args, **kwargs: watch(layer, forward, *args, **kwargs)


def _spec_of(model: nn.Module, sites: list[RouterSite], seen: list[list[Selection]]) -> RoutingSpec:
    shapes = {(s[-1].scores_RE.shape[-1], s[-1].ids_RK.shape[-1]) for s in seen}
    if len(shapes) > 1:
        raise AttachError(f"the routers differ in (experts, top-k): {sorted(shapes)}; one trace holds one shape")
    for site, selections in zip(sites, seen, strict=True):
        if selections[-1].scores_RE.shape[:-1] != (PROBE_TOKENS,):
            raise AttachError(
                f"router {site.path} selects on scores of shape {tuple(selections[-1].scores_RE.shape)}; "
                f"expected [tokens, experts] with {PROBE_TOKENS} tokens"
            )
    ((num_experts, top_k),) = shapes
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return RoutingSpec(num_experts, top_k, tuple(site.layer for site in sites), model=str(name))


def _check_own_routes(routed: RoutedModel, trunk: nn.Module) -> RoutingTrace:
    tokens = _probe_tokens(trunk)
    with routed.record() as recording:
        native = _output(routed.model, tokens)
    own = recording.trace()
    with routed.replay(own), routed.record() as recording:
        replayed = _output(routed.model, tokens)
    if not recording.trace().equals(own) or not torch.equal(native, replayed):
        raise AttachError(
            f"self-check failed: replaying the model's own routes changed its output by up to "
            f"{(native - replayed).abs().max().item():.3g}; this family needs an adapter of its own"
        )
    return own


def _check_other_routes(routed: RoutedModel, trunk: nn.Module, sites: list[RouterSite], own: RoutingTrace) -> None:
    """Force experts that the model would not pick, and look at what each router hands on."""
    other = _other_routes(own)
    if other is None:
        return
    returned: list[list[Tensor]] = []
    with ExitStack() as stack:
        for site in sites:
            hook = site.module.register_forward_hook(lambda _, args, output: returned.append(_id_tensors(output)))
            stack.callback(hook.remove)
        stack.enter_context(routed.replay(other))
        _output(routed.model, _probe_tokens(trunk))
    for layer, (site, id_tensors) in enumerate(zip(sites, returned, strict=True)):
        forced = torch.from_numpy(other.expert_ids_NLK[:, layer].astype(np.int64))
        same_shape = [ids.cpu().long() for ids in id_tensors if ids.shape == forced.shape]
        if not any(torch.equal(ids, forced) for ids in same_shape):
            raise AttachError(
                f"self-check failed: router {site.path} ({type(site.module).__name__}) was told to pick other experts "
                "and its selection was not obeyed; this family needs an adapter of its own"
            )


def _id_tensors(output: Any) -> list[Tensor]:
    parts = output if isinstance(output, tuple | list) else [output]
    return [part for part in parts if isinstance(part, Tensor) and not part.is_floating_point()]


def _other_routes(trace: RoutingTrace) -> RoutingTrace | None:
    """Each id moved to the next expert; None where all experts are always picked."""
    spec = trace.spec
    if spec.top_k == spec.num_experts:
        return None
    ids = (trace.expert_ids_NLK.astype(np.int64) + 1) % spec.num_experts
    return RoutingTrace.from_sequences(spec, [trace.tokens(0)], [ids])


def _probe_tokens(trunk: nn.Module) -> Tensor:
    embedding = trunk.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = embedding.weight
    return torch.arange(PROBE_TOKENS, device=weight.device)[None] % weight.shape[0]


def _output(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of the whole model: a sharded one gathers its weights only when it is called as a whole."""
    result: Tensor = model(input_ids=tokens, use_cache=False)[0]
    return result


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, nothing compiled, random state kept; training flags restored module by module."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, flag in training:
            module.training = flag

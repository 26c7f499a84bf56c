"""Attaching: find the routers of the forwarded decoder, name their layers, and prove replay on each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foreroute.adapters.megatron.discover import Chunk, ChunkRouter, find_chunks, require_replayable
from foreroute.adapters.megatron.model import RoutedMegatron
from foreroute.adapters.megatron.route_shard import Share
from foreroute.adapters.megatron.router_hook import TopKRouterHook, require_idle
from foreroute.core.hooks import is_hooked
from foreroute.core.passes import Pass, Rows, Watch, signed_dtype
from foreroute.core.recompute import prove
from foreroute.errors import AttachError, ForerouteError, ReplayError
from foreroute.trace import RoutedLayer, RoutingSpec

ROWS = 8
"""Random hidden states that a router is checked on."""


def attach(model: nn.Module | Sequence[nn.Module]) -> RoutedMegatron:
    """Make the routing of a Megatron-Core model recordable and replayable.

    Every pipeline rank must call it, since ranks tell each other which layers they route. Each router runs four times
    on 8 random rows, to prove that replaying its own routes changes no bit and that other routes are obeyed. The model
    is left as it was.

    Args:
        model: a GPTModel of megatron-core 0.16.1 or newer, wrapped or not, or the list of its virtual pipeline chunks.

    Raises:
        AttachError: when there are no routers, a setting bypasses or changes the selection, or a router does not pass
            the self-check, on this pipeline rank or another. The message says which router and why.
        ReplayError: when Megatron's own router replay is active.
    """
    chunks = find_chunks(model)
    sites = [site for chunk in chunks for site in chunk.sites]
    places = max([1, *(site.block.ep_group.size() for site in sites)])
    here = PipelineStage(
        [site.layer for site in sites], {(s.module.num_experts, s.module.topk) for s in sites}, places, None
    )
    problem = _problem(chunks, sites)
    # a stage that gave up without a word would leave the others waiting for it
    stages = _every_stage(chunks[0].trunk, replace(here, problem=None if problem is None else str(problem)))
    if problem is not None:
        raise problem
    for rank, stage in enumerate(stages):
        if stage.problem is not None:
            raise AttachError(f"pipeline rank {rank} cannot be attached: {stage.problem}")
    share = Share.of(chunks[0].trunk, [site.module for site in sites])
    return RoutedMegatron(chunks, _spec_of(chunks[0].trunk, stages), share, max(stage.places for stage in stages))


@dataclass(frozen=True)
class PipelineStage:
    """What pipeline ranks tell each other.

    Attributes:
        layers: its routed layers.
        shapes: (experts, top-k) of its routers.
        places: expert-parallel ranks that its experts are spread over; 1 where it has none.
        problem: why it cannot be attached, or None.
    """

    layers: list[RoutedLayer]
    shapes: set[tuple[int, int]]
    places: int
    problem: str | None


def _problem(chunks: tuple[Chunk, ...], sites: list[ChunkRouter]) -> ForerouteError | None:
    if any(is_hooked(chunk.trunk) for chunk in chunks):
        return AttachError("a session is open on this model; attach it before or after, or use the one that it has")
    try:
        require_replayable(sites)
        prove()
        for site in sites:
            require_idle(site)
            self_check(site)
    except ForerouteError as error:
        return error
    return None


def _every_stage(trunk: Any, here: PipelineStage) -> list[PipelineStage]:
    group = trunk.pg_collection.pp
    if group is None or group.size() == 1:
        return [here]
    stages: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(stages, here, group=group)
    return stages


def _spec_of(trunk: Any, stages: list[PipelineStage]) -> RoutingSpec:
    """The table of the whole model."""
    layers = sorted(layer for stage in stages for layer in stage.layers)
    shapes = sorted({shape for stage in stages for shape in stage.shapes})
    if not layers:
        raise AttachError(f"{type(trunk).__name__} has no MoE layer; attach a Mixture-of-Experts model")
    if len(set(layers)) != len(layers) or layers[-1].index >= trunk.config.num_layers:
        raise AttachError(
            f"the routers number their layers {[layer.index + 1 for layer in layers]} in a model of "
            f"{trunk.config.num_layers}; expected each once. Pass every virtual chunk of this rank, and no chunk of "
            "another"
        )
    if len(shapes) > 1:
        raise AttachError(f"the routers differ in (experts, top-k): {shapes}; one trace holds one shape")
    ((num_experts, top_k),) = shapes
    return RoutingSpec(num_experts, top_k, tuple(layers), model=type(trunk).__name__)


def self_check(site: ChunkRouter) -> None:
    """Run the router as it is, watched, on its own routes, and on other routes.

    Replay must be invisible on its own routes and obeyed on others.

    Raises:
        AttachError: when replay changes what it should not, or does not change what it should.
    """
    router = site.module
    with _untouched(site):
        hidden = _moderate(torch.randn(ROWS, 1, router.config.hidden_size).to(router.weight), router.weight)
        native = _route(site, hidden)
        seen = _pass(site, hidden)
        watched = _route(site, hidden, seen)
        own_RK = seen.own_LRK[0].long()
        own = _route(site, hidden, _pass(site, hidden, own_RK))
        other_RK = (own_RK + 1) % router.num_experts
        other = _route(site, hidden, _pass(site, hidden, other_RK))
    for what, result in (("watching it", watched), ("replaying its own routes", own)):
        if not all(torch.equal(a, b) for a, b in zip(native, result, strict=True)):
            raise AttachError(
                f"self-check failed: {what} changed what router {site.path} hands on; something replaced a part of it"
            )
    _require_obeyed(site, other, other_RK)


def _require_obeyed(site: ChunkRouter, handed_on: tuple[Tensor, Tensor], wanted_RK: Tensor) -> None:
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


def _route(site: ChunkRouter, hidden: Tensor, current: Pass | None = None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)  # input jitter draws numbers
    hook = TopKRouterHook(site)
    try:
        if current is not None:
            [hook.now] = current.parts()
            hook.install(partial(hook.select, hook.now))
        try:
            # its hooks are not for rows of ours: those of DDP would begin to gather parameters
            probs, routing_map = site.module.forward(hidden)
        finally:
            hook.remove()
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


def _pass(site: ChunkRouter, hidden: Tensor, ids_RK: Tensor | None = None) -> Pass:
    router = site.module
    rows = None if ids_RK is None else Rows(ids_RK[None])
    return Pass([(site.path, router.topk)], ROWS, signed_dtype(router.num_experts), hidden.device, rows, Watch())


@contextmanager
def _untouched(site: ChunkRouter) -> Iterator[None]:
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

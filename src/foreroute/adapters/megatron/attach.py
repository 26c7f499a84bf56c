"""Attaching: find the routers of the forwarded decoder, name their layers, and prove replay on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from foreroute.adapters.megatron.discover import Chunk, RouterSite, find_chunks
from foreroute.adapters.megatron.model import RoutedModel
from foreroute.adapters.megatron.ranks import Share
from foreroute.adapters.megatron.refusals import require_idle, require_replayable
from foreroute.adapters.megatron.self_check import self_check
from foreroute.adapters.overriding import is_hooked
from foreroute.errors import AttachError, ForerouteError
from foreroute.trace import RoutedLayer, RoutingSpec


def attach(model: nn.Module | Sequence[nn.Module]) -> RoutedModel:
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
    here = Stage([site.layer for site in sites], {(s.module.num_experts, s.module.topk) for s in sites}, places, None)
    problem = _problem(chunks, sites)
    # a stage that gave up without a word would leave the others waiting for it
    stages = _every_stage(chunks[0].trunk, replace(here, problem=None if problem is None else str(problem)))
    if problem is not None:
        raise problem
    for rank, stage in enumerate(stages):
        if stage.problem is not None:
            raise AttachError(f"pipeline rank {rank} cannot be attached: {stage.problem}")
    share = Share.of(chunks[0].trunk, [site.module for site in sites])
    return RoutedModel(chunks, _spec_of(chunks[0].trunk, stages), share, max(stage.places for stage in stages))


@dataclass(frozen=True)
class Stage:
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


def _problem(chunks: tuple[Chunk, ...], sites: list[RouterSite]) -> ForerouteError | None:
    if any(is_hooked(chunk.trunk) for chunk in chunks):
        return AttachError("a session is open on this model; attach it before or after, or use the one that it has")
    try:
        require_replayable(sites)
        require_idle(sites)
        for site in sites:
            self_check(site)
    except ForerouteError as error:
        return error
    return None


def _every_stage(trunk: Any, here: Stage) -> list[Stage]:
    group = trunk.pg_collection.pp
    if group is None or group.size() == 1:
        return [here]
    stages: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(stages, here, group=group)
    return stages


def _spec_of(trunk: Any, stages: list[Stage]) -> RoutingSpec:
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

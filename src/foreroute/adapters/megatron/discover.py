"""Finding the routers that a Megatron-Core model forwards through, by what they are and not by their order.

A router belongs to the model when it sits in the decoder of the module that is called. Routers of multi-token
prediction, of a second decoder that was built and never called, or of another model are somewhere else, whatever
number they carry and whenever they were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core
import torch
from megatron.core.transformer.moe.router import Router, TopKRouter
from torch import Tensor, nn

from foreroute.errors import AttachError
from foreroute.trace import RoutedLayer

BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
IN_GRAPHS = "captures routers in CUDA graphs, which repeat one batch's routes for ever; train without"
REFUSED = {
    "moe_router_fusion": "selects in a fused kernel, which replay cannot reach; set it to False",
    "moe_router_force_load_balancing": "replaces the router's logits; switch it off",
    "moe_router_force_biased": "replaces the router's logits; switch it off",
    "overlap_moe_expert_parallel_comm": "runs layers of two micro-batches by turns, outside of their forwards",
    "cuda_graph_impl": IN_GRAPHS,
    "enable_cuda_graph": IN_GRAPHS,
    "external_cuda_graph": IN_GRAPHS,
    "moe_expert_rank_capacity_factor": "drops tokens after the selection; train dropless",
}
"""Settings under which replay would be bypassed, or would not be what is executed; None, False and "none" are not."""


@dataclass(frozen=True)
class ChunkRouter:
    """One router of a chunk."""

    path: str  # dotted name inside the chunk
    module: Any
    block: Any  # the MoE layer that calls it
    layer: RoutedLayer  # numbers count decoder layers of the whole model from 0, dense ones included


def find_trunks(model: nn.Module | Sequence[nn.Module]) -> list[Any]:
    """Find the module of each chunk that takes tokens and owns the decoder; raise `AttachError` for other models."""
    parts = [model] if isinstance(model, nn.Module) else model
    if not isinstance(parts, Sequence) or not all(isinstance(part, nn.Module) for part in parts):
        given = f"a {type(model).__name__}" + (" of other things than modules" if isinstance(model, Sequence) else "")
        raise AttachError(f"attach was given {given}; expected a model of Megatron-Core, or the list of its chunks")
    trunks = [_trunk(part) for part in parts]
    if not trunks:
        raise AttachError("there is no model to attach; pass a model, or the list of its virtual pipeline chunks")
    if len(set(trunks)) != len(trunks):
        raise AttachError("the same chunk was passed twice; pass the list that Megatron's schedules take")
    return trunks


def _trunk(model: nn.Module) -> Any:
    # a decoder is a stack of layers that a pipeline stage hands hidden states to
    owners = {
        path: module
        for path, module in model.named_modules()
        if hasattr(decoder := getattr(module, "decoder", None), "layers") and hasattr(decoder, "set_input_tensor")
    }
    if not owners:
        raise AttachError(
            f"{type(model).__name__} has no decoder of Megatron-Core; attach a GPTModel of megatron-core 0.16.1 or "
            "newer, or the list of its chunks"
        )
    if len({owner.decoder for owner in owners.values()}) > 1:
        raise AttachError(
            f"{type(model).__name__} has {len(owners)} decoders ({', '.join(owners)}); attach the part that is called, "
            "such as model.language_model"
        )
    return next(iter(owners.values()))


def find_sites(trunk: Any) -> list[ChunkRouter]:
    """The routers of its decoder, in layer order; none where the stage has dense layers only."""
    sites = []
    for path, block in trunk.decoder.named_modules(prefix="decoder"):
        router = getattr(block, "router", None)
        if isinstance(router, Router):
            if not isinstance(router.layer_number, int):
                raise AttachError(f"router {path}.router has no layer number; build the model from its layer specs")
            sites.append(ChunkRouter(f"{path}.router", router, block, RoutedLayer(router.layer_number - 1)))
    return sorted(sites, key=lambda site: site.layer)


def find_other_routers(trunk: Any) -> list[str]:
    """Name the routers beside its decoder, such as those of multi-token prediction, which route natively."""
    decoder = set(trunk.decoder.modules())
    return [name for name, module in trunk.named_modules() if isinstance(module, Router) and module not in decoder]


def require_replayable(sites: Sequence[ChunkRouter]) -> None:
    """Raise `AttachError` naming the first router, or setting, that cannot be replayed exactly."""
    for site in sites:
        reason = _unknown_class(site.module) or _refused_setting(site.module)
        if reason:
            raise AttachError(f"router {site.path} ({type(site.module).__name__}) cannot be replayed: {reason}")


def objection_to_settings(config: Any, refused: Mapping[str, str]) -> str | None:
    """Name the first of these settings that is on, and say why it is refused; None where all are off."""
    for name, why in refused.items():
        given = getattr(config, name, None)
        if given is not None and given is not False and given != "none":
            return f"{name}={given!r} {why}"
    return None


def objection_to_output(site: ChunkRouter, probs: Tensor, routing_map: Tensor) -> str | None:
    """Say what a router returned in place of weights and a map with a column for each expert; None where it did not."""
    num_experts = site.module.num_experts
    if routing_map.dtype == torch.bool and probs.shape[-1] == routing_map.shape[-1] == num_experts:
        return None
    return (
        f"router {site.path} returns weights {list(probs.shape)} and a map {list(routing_map.shape)} of "
        f"{routing_map.dtype}; expected a column for each of {num_experts} experts, and a map of bool"
    )


def _unknown_class(router: Any) -> str | None:
    if not isinstance(router, TopKRouter):
        return "expected megatron.core's TopKRouter"
    if "router_replay" not in vars(router):
        version = megatron.core.__version__
        return f"megatron-core {version} hands its selection to nobody; install megatron-core 0.16.1 or newer"
    for name in ("forward", "routing"):
        if getattr(type(router), name) is not getattr(TopKRouter, name):
            return f"it has a {name} of its own, and what that selects is not known; use TopKRouter"
        if name in vars(router):
            return f"its {name} was replaced on the instance; attach before patching it"
    return None


def _refused_setting(router: Any) -> str | None:
    config = router.config
    balancing = router.routing_type if isinstance(router.routing_type, list) else [router.routing_type]
    for each in balancing:
        if each not in BALANCING:
            return f"moe_router_load_balancing_type {each!r} does not select by top-k of its scores"
    if setting := objection_to_settings(config, REFUSED):
        return setting
    if getattr(config, "mlp_chunks_for_training", 1) > 1:
        return "mlp_chunks_for_training has a router run several times in one forward; set it to 1"
    factor = config.moe_expert_capacity_factor
    # the capacity is ceil(factor * rows * K / E), and no expert is picked more often than there are rows
    holds_every_row = factor is not None and factor * router.topk >= config.num_moe_experts
    if factor is not None and (config.moe_pad_expert_input_to_capacity or not holds_every_row):
        return (
            f"moe_expert_capacity_factor={factor} drops or adds picks after the selection, so that other experts run "
            "than were replayed; train dropless, or with a factor of at least "
            f"E/K = {config.num_moe_experts / router.topk:g} and without moe_pad_expert_input_to_capacity"
        )
    return None

"""Finding the routers that a Megatron-Core model forwards through, by what they are and not by their order.

A router belongs to the model when it sits in the decoder of the module that is called. Routers of multi-token
prediction, of a second decoder that was built and never called, or of another model are somewhere else, whatever
number they carry and whenever they were made.

Configurations under which replay would be bypassed, or would not be what is executed, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core
from megatron.core.transformer.moe.router import Router, TopKRouter
from torch import nn

from foreroute.errors import AttachError
from foreroute.trace import RoutedLayer

BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}


@dataclass(frozen=True)
class ChunkRouter:
    """One router of a chunk.

    Attributes:
        path: dotted name inside the chunk.
        module: the router.
        block: the MoE layer that calls it.
        layer: its row of the layer axis; numbers count decoder layers of the whole model from 0, dense ones included.
    """

    path: str
    module: Any
    block: Any
    layer: RoutedLayer


@dataclass(frozen=True)
class Chunk:
    """What one rank runs in one go: the whole model, its pipeline stage, or one virtual chunk of that.

    Attributes:
        trunk: the module that takes tokens and owns the decoder; its forward is one pass.
        decoder: its stack of layers.
        sites: routers of the decoder, in layer order; none where the stage has dense layers only.
    """

    trunk: Any
    decoder: Any
    sites: tuple[ChunkRouter, ...]


def find_chunks(model: nn.Module | Sequence[nn.Module]) -> tuple[Chunk, ...]:
    """The chunks of this rank, in the order of the virtual stages.

    Args:
        model: a model as Megatron's schedules take it, wrapped (DDP, Float16Module) or not, or a list of such chunks.

    Raises:
        AttachError: for what is no Megatron-Core model, or has several decoders.
    """
    parts = [model] if isinstance(model, nn.Module) else model
    if not isinstance(parts, Sequence) or not all(isinstance(part, nn.Module) for part in parts):
        given = f"a {type(model).__name__}" + (" of other things than modules" if isinstance(model, Sequence) else "")
        raise AttachError(f"attach was given {given}; expected a model of Megatron-Core, or the list of its chunks")
    chunks = tuple(_chunk(part) for part in parts)
    if not chunks:
        raise AttachError("there is no model to attach; pass a model, or the list of its virtual pipeline chunks")
    trunks = [id(chunk.trunk) for chunk in chunks]
    if len(set(trunks)) != len(trunks):
        raise AttachError("the same chunk was passed twice; pass the list that Megatron's schedules take")
    return chunks


def _chunk(model: nn.Module) -> Chunk:
    owners = [(path, module) for path, module in model.named_modules() if _is_decoder(getattr(module, "decoder", None))]
    if not owners:
        raise AttachError(
            f"{type(model).__name__} has no decoder of Megatron-Core; attach a GPTModel of megatron-core 0.16.1 or "
            "newer, or the list of its chunks"
        )
    if len({id(owner.decoder) for _, owner in owners}) > 1:
        raise AttachError(
            f"{type(model).__name__} has {len(owners)} decoders ({', '.join(path for path, _ in owners)}); attach the "
            "part that is called, such as model.language_model"
        )
    trunk: Any = owners[0][1]
    return Chunk(trunk, trunk.decoder, _sites(trunk))


def _is_decoder(part: Any) -> bool:
    """Whether it is a stack of layers that a pipeline stage hands hidden states to."""
    return isinstance(part, nn.Module) and hasattr(part, "layers") and hasattr(part, "set_input_tensor")


def _sites(trunk: Any) -> tuple[ChunkRouter, ...]:
    sites = []
    for path, block in trunk.decoder.named_modules(prefix="decoder"):
        router = getattr(block, "router", None)
        if isinstance(router, Router):
            if not isinstance(router.layer_number, int):
                raise AttachError(f"router {path}.router has no layer number; build the model from its layer specs")
            sites.append(ChunkRouter(f"{path}.router", router, block, RoutedLayer(router.layer_number - 1)))
    return tuple(sorted(sites, key=lambda site: site.layer))


def require_replayable(sites: list[ChunkRouter]) -> None:
    """Raise `AttachError` naming the first router, or setting, that cannot be replayed exactly."""
    for site in sites:
        _require_known_class(site)
        reason = _refusal(site.module)
        if reason:
            raise AttachError(f"router {site.path} cannot be replayed: {reason}")


def _require_known_class(site: ChunkRouter) -> None:
    kind = type(site.module)
    if not isinstance(site.module, TopKRouter):
        raise AttachError(f"router {site.path} is a {kind.__name__}; expected megatron.core's TopKRouter")
    if "router_replay" not in vars(site.module):
        raise AttachError(
            f"router {site.path} of megatron-core {megatron.core.__version__} hands its selection to nobody; install "
            "megatron-core 0.16.1 or newer"
        )
    for name in ("forward", "routing"):
        if getattr(kind, name) is not getattr(TopKRouter, name):
            raise AttachError(
                f"router {site.path} ({kind.__name__}) has a {name} of its own, and what that selects is not known; "
                "use TopKRouter"
            )
        if name in vars(site.module):
            raise AttachError(f"{name} of router {site.path} was replaced on the instance; attach before patching it")


def _refusal(router: Any) -> str | None:
    config = router.config
    balancing = router.routing_type if isinstance(router.routing_type, list) else [router.routing_type]
    unknown = [kind for kind in balancing if kind not in BALANCING]
    if unknown:
        return f"moe_router_load_balancing_type {unknown[0]!r} does not select by top-k of its scores"
    if config.moe_router_fusion:
        return "moe_router_fusion selects in a fused kernel, which replay cannot reach; set moe_router_fusion=False"
    if config.moe_router_force_load_balancing or getattr(config, "moe_router_force_biased", None) is not None:
        return "moe_router_force_load_balancing and moe_router_force_biased replace its logits; switch them off"
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        return "overlap_moe_expert_parallel_comm runs layers of two micro-batches by turns, outside of their forwards"
    if getattr(config, "mlp_chunks_for_training", 1) > 1:
        return "mlp_chunks_for_training has a router run several times in one forward; set it to 1"
    return _graph_refusal(config) or _drop_refusal(router)


def _graph_refusal(config: Any) -> str | None:
    names = ("enable_cuda_graph", "external_cuda_graph")
    if config.cuda_graph_impl != "none" or any(getattr(config, name, False) for name in names):
        return (
            f"cuda_graph_impl={config.cuda_graph_impl!r} captures routers in CUDA graphs, which repeat one batch's "
            "routes for ever; train with cuda_graph_impl='none'"
        )
    return None


def _drop_refusal(router: Any) -> str | None:
    """Capacity: replayed picks over it would be dropped after the selection, by live weights or position."""
    config = router.config
    if getattr(config, "moe_expert_rank_capacity_factor", None) is not None:
        return "moe_expert_rank_capacity_factor drops tokens after the selection; train dropless"
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

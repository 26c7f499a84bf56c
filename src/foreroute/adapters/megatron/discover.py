"""Finding the routers that a Megatron-Core model forwards through, by what they are and not by their order.

A router belongs to the model when it sits in the decoder of the module that is called. Routers of multi-token
prediction, of a second decoder that was built and never called, or of another model are somewhere else, whatever
number they carry and whenever they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe.router import Router
from torch import nn

from foreroute.errors import AttachError
from foreroute.trace import RoutedLayer


@dataclass(frozen=True)
class RouterSite:
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
    sites: tuple[RouterSite, ...]


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


def _sites(trunk: Any) -> tuple[RouterSite, ...]:
    sites = []
    for path, block in trunk.decoder.named_modules(prefix="decoder"):
        router = getattr(block, "router", None)
        if isinstance(router, Router):
            if not isinstance(router.layer_number, int):
                raise AttachError(f"router {path}.router has no layer number; build the model from its layer specs")
            sites.append(RouterSite(f"{path}.router", router, block, RoutedLayer(router.layer_number - 1)))
    return tuple(sorted(sites, key=lambda site: site.layer))

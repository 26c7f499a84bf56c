"""Routers that a quantizing loader packed, and that so choose other experts than those of an engine.

Loaders that pack every `nn.Linear` pack the one inside the router too, in families whose router has one (Gemma 4,
HunYuan, AFMoE, JetMoE and others). Nothing of a loader is imported: a packed weight shows by how it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from foreroute.core.hooks import SelectingRouter
from foreroute.core.untouched import plain_tensors


def about_packed(routers: Sequence[SelectingRouter]) -> str:
    """Say what packed weights of routers do, and how to leave them whole; nothing where no router has one."""
    packed = [
        (".".join(filter(None, (router.path, inner))), stored)
        for router in routers
        if not router.rule.is_lookup  # whose table is integers
        for inner, module in router.module.named_modules()
        if (stored := _packed_as(module)) is not None
    ]
    if not packed:
        return ""
    names = sorted({_within_layer(path) for path, _ in packed})
    first, stored = packed[0]
    return (
        f"weights of routers were packed when the model was loaded ({stored} in {first}, {len(packed)} in all): such a "
        "router chooses other experts than a whole one, in 4 bits for about a third of the tokens, and engines have it "
        f"whole; leave {', '.join(names)} out of quantization, by llm_int8_skip_modules = {['lm_head', *names]} of "
        "bitsandbytes, modules_to_not_convert of other configurations of transformers, or filter_fn of torchao's "
        "quantize_"
    )


def _packed_as(module: nn.Module) -> str | None:
    """Name how the weight of a module itself is stored, where that is not as floats of two bytes or more."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.ndim < 2:  # counts, biases and scales
            continue
        for stored in plain_tensors(tensor.detach()):
            is_whole = stored.is_floating_point() and stored.itemsize > 1
            if not is_whole and stored.dtype != torch.bool:
                return str(stored.dtype).removeprefix("torch.")
    return None


def _within_layer(path: str) -> str:
    """Give the end of a path, behind the number of its layer."""
    parts = path.split(".")
    number = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[number + 1 :])

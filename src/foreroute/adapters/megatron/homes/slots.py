"""The parameters of each expert that a Megatron MoE layer has on this rank, and whether they may be moved."""

from __future__ import annotations

import re
from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foreroute.adapters.megatron.discover import RouterSite
from foreroute.errors import TransferError

PARAMETERS = {
    SequentialMLP: re.compile(r"local_experts\.(?P<slot>\d+)\.(?P<name>.+)"),
    TEGroupedMLP: re.compile(r"(?P<name>linear_fc[12]\.(?:weight|bias))(?P<slot>\d+)"),
}
"""Experts modules whose parameters belong to one expert each, and how their names say to which."""


def expert_slots(site: RouterSite) -> list[dict[str, nn.Parameter]]:
    """The parameters of the expert in each slot of this rank, by name.

    Raises:
        TransferError: when a layer dispatches or keeps its experts in a way that is not known, or they have gradients.
    """
    block, experts = site.block, site.block.experts
    _require_known(site, block, experts)
    slots: list[dict[str, nn.Parameter]] = [{} for _ in range(block.num_local_experts)]
    parameters = dict(experts.named_parameters())
    matches = {
        name: PARAMETERS[type(experts)].fullmatch(name) for name in [*parameters, *dict(experts.named_buffers())]
    }
    for name, match in matches.items():
        if match is None or name not in parameters or int(match["slot"]) >= len(slots):
            raise TransferError(
                f"the experts of {site.path} have {name}, of which it is not known whose it is; homes of "
                f"{' and '.join(kind.__name__ for kind in PARAMETERS)} can be moved, with parameters of one expert each"
            )
        parameter = parameters[name]
        if isinstance(parameter, DTensor) or not parameter.is_contiguous():
            raise TransferError(
                f"{name} of {site.path} is sharded, or not contiguous; move homes of models that FSDP does not shard"
            )
        if _has_gradient(parameter):
            raise TransferError(
                f"{name} of {site.path} has a gradient; move homes between two steps, after zero_grad() of the "
                "optimizer and zero_grad_buffer() of DistributedDataParallel"
            )
        slots[int(match["slot"])][match["name"]] = parameter
    return slots


def _require_known(site: RouterSite, block: Any, experts: Any) -> None:
    if type(experts) not in PARAMETERS:
        raise TransferError(
            f"the experts of {site.path} are a {type(experts).__name__}; homes of "
            f"{' and '.join(kind.__name__ for kind in PARAMETERS)} can be moved"
        )
    for name in ("forward", "preprocess"):
        if getattr(type(block), name, None) is not getattr(MoELayer, name):
            raise TransferError(
                f"the layer of {site.path} ({type(block).__name__}) has a {name} of its own, so it is not known where "
                "it dispatches; homes of MoELayer can be moved"
            )
    config = block.config
    if config.fp8 or getattr(config, "fp4", None):
        raise TransferError(
            f"the experts of {site.path} run in fp8 or fp4, whose scaling factors belong to slots and would stay "
            "behind; train in bf16 to move homes"
        )


def _has_gradient(parameter: nn.Parameter) -> bool:
    """A gradient of zeros is none."""
    grads: list[Tensor | None] = [parameter.grad, getattr(parameter, "main_grad", None)]
    return any(grad is not None and bool(grad.any()) for grad in grads)

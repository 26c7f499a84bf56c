"""Dense parameters of an expert-parallel model cut over the same ranks, by FSDP2."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard_dense(
    model: nn.Module, experts: Sequence[nn.Parameter], paths: Sequence[str], group: dist.ProcessGroup
) -> None:
    """Cut every parameter of a model but experts, block by block. A collective call.

    Gradients of ranks are added up, not averaged: each rank backpropagates its part of one loss.

    Args:
        model: changed in place.
        experts: parameters of this rank, left as they are.
        paths: of the modules with experts, which are in the blocks.
        group: the ranks.
    """
    mesh, ignored = DeviceMesh.from_group(group, experts[0].device.type), set(experts)
    for block in _blocks(model, paths):
        fully_shard(block, mesh=mesh, ignored_params=ignored)
    # resharded after every forward, since a forward without gradients is followed by no backward that does it
    fully_shard(model, mesh=mesh, ignored_params=ignored, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def cut_alike(tensor: Tensor, parameter: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole."""
    return distribute_tensor(
        tensor.detach().to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def _blocks(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """The members of the lists of modules that hold experts, dense members among them."""
    lists = {found[0]: None for path in paths if (found := re.split(r"\.\d+\.", path, maxsplit=1))[1:]}
    return [block for path in lists for block in model.get_submodule(path).children()]

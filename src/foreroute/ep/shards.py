"""What a rank holds of the model, and what ranks share of it: home experts, parts of dense parameters, gradients.

Experts are cut by their home rank; dense parameters are whole on every rank, or cut by FSDP2. Gradients of dense
parameters are added up over all ranks, and the norm of all gradients is that of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from foreroute.ep.transfer.peers import collective_errors
from foreroute.errors import PlacementError

WHOLE_OR_SHARDED = (
    "save it with torch.distributed.checkpoint, or take state_dict() of the placed model, which is whole on every rank"
)


class ExpertAxis(NamedTuple):
    """Where a tensor has its experts: one dimension counts them, alone or among other factors.

    Attributes:
        dim: the dimension.
        factors: what it is the product of, -1 for the experts.
    """

    dim: int = 0
    factors: tuple[int, ...] = (-1,)

    @property
    def place(self) -> int:
        """The dimension of the experts, once factors are apart."""
        return self.dim + self.factors.index(-1)

    def first(self, tensor: Tensor) -> Tensor:
        """A view with the experts in front; the tensor itself where they are."""
        return tensor if self == IN_FRONT else tensor.unflatten(self.dim, self.factors).movedim(self.place, 0)

    def back(self, experts: Tensor) -> Tensor:
        """The tensor of which `first` gives this."""
        return experts.movedim(0, self.place).flatten(self.dim, self.dim + len(self.factors) - 1)


IN_FRONT = ExpertAxis()
"""The axis of the experts' weights."""


class LogicalExperts(Tensor):
    """Some experts of a tensor that has E in order of their ids, of which this rank has these alone.

    `torch.distributed.checkpoint` saves and loads it on any number of ranks, wherever experts live, and it is saved as
    any other tensor of its shape. Nothing else can be done with it.

    Args:
        local: the experts here, whose memory it is.
        experts: int64 [experts here], ascending.
        num_experts: E.
        axis: of the experts.

    Attributes:
        local, experts: the same.
    """

    local: Tensor
    experts: NDArray[np.int64]
    _parts: LocalShardsWrapper

    @staticmethod
    def __new__(
        cls, local: Tensor, experts: NDArray[np.int64], num_experts: int, axis: ExpertAxis = IN_FRONT
    ) -> LogicalExperts:
        dim, around = axis.dim, axis.factors.index(-1)
        outer, inner = prod(axis.factors[:around]), prod(axis.factors[around + 1 :])
        shape = *local.shape[:dim], outer * num_experts * inner, *local.shape[dim + 1 :]
        made: LogicalExperts = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.experts = local, experts
        parts, offsets = [], []
        for run in np.split(np.arange(len(experts)), np.flatnonzero(np.diff(experts) != 1) + 1):
            for before in range(outer):
                start = (before * len(experts) + int(run[0])) * inner
                parts.append(local.narrow(dim, start, len(run) * inner))
                offset = (before * num_experts + int(experts[run[0]])) * inner
                offsets.append(tuple(offset if each == dim else 0 for each in range(local.dim())))
        made._parts = LocalShardsWrapper(parts, offsets)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise PlacementError(f"{func} would see only the experts that live on this rank; {WHOLE_OR_SHARDED}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlacementError(f"a rank holds only the experts that live on it; {WHOLE_OR_SHARDED}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LogicalExperts({list(self.shape)}, here {self.experts.tolist()})"

    def __create_write_items__(self, name: str, whole: Any) -> list[WriteItem]:
        return self._parts.__create_write_items__(name, whole)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._parts.__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._parts.__get_tensor_shard__(index)


def keep_experts(module: nn.Module, experts: NDArray[np.integer], axis: ExpertAxis = IN_FRONT) -> None:
    """Replace the parameters of a module, E experts each, by those of some, integers in ascending order."""
    for name, full in list(module.named_parameters(recurse=False)):
        module._parameters[name] = nn.Parameter(chosen(full, experts, axis), requires_grad=full.requires_grad)


def chosen(full: Tensor, experts: NDArray[np.integer], axis: ExpertAxis) -> Tensor:
    """Some experts of a tensor, copied; integers in ascending order."""
    return axis.back(axis.first(full.detach()).index_select(0, torch.from_numpy(experts).to(full.device)))


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


def sum_gradients(dense: Sequence[nn.Parameter], group: dist.ProcessGroup, host_group: dist.ProcessGroup) -> None:
    """Add up the gradients of parameters that all ranks hold alike, in place.

    A parameter that has a gradient on one rank has one on all of them afterwards; others are left without.

    Args:
        dense: the same on all ranks, in the same order; sharded ones are left alone.
        group: the ranks, for the gradients.
        host_group: the same ranks, for tensors on the host.
    """
    dense = [parameter for parameter in dense if not isinstance(parameter, DTensor)]
    has_grad = torch.tensor([parameter.grad is not None for parameter in dense], dtype=torch.uint8)
    with collective_errors("comparing which gradients there are", host_group):
        dist.all_reduce(has_grad, dist.ReduceOp.MAX, group=host_group)
    grads = [_gradient(parameter) for parameter, has in zip(dense, has_grad.tolist(), strict=True) if has]
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        alike = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in alike])
        with collective_errors("adding up gradients", group):
            dist.all_reduce(flat, group=group)
        for grad, total in zip(alike, flat.split([grad.numel() for grad in alike]), strict=True):
            grad.copy_(total.view_as(grad))


def clip_gradients(
    dense: Sequence[nn.Parameter], experts: Sequence[nn.Parameter], max_norm: float, group: dist.ProcessGroup
) -> Tensor:
    """Scale gradients so that their norm over the whole model is at most `max_norm`.

    Args:
        dense: parameters whose gradients are the same on all ranks, and count once; or of which each rank has a part.
        experts: parameters of this rank.
        max_norm: of all gradients together.
        group: the ranks.

    Returns:
        The norm before, in float32, or float64 for parameters in float64.
    """
    sharded = [parameter for parameter in dense if isinstance(parameter, DTensor)]
    dense = [parameter for parameter in dense if not isinstance(parameter, DTensor)]
    there = [_local(parameter.grad) for parameter in [*dense, *sharded, *experts] if parameter.grad is not None]
    squared = _squared_norm([*experts, *sharded])
    with collective_errors("adding up the norm of gradients", group):
        dist.all_reduce(squared, group=group)
    norm = (squared + _squared_norm(dense) if dense else squared).sqrt()
    # the same small number as in torch.nn.utils.clip_grad_norm_
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in there:
        grad.mul_(scale.to(grad.dtype))
    return norm


def _squared_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    dtype = reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)
    grads = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    squares = [grad.to(dtype).square().sum() for grad in grads]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=dtype, device=parameters[0].device)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad

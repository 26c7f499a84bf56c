"""Gradients over all ranks: those of dense parameters added up, and the norm of the whole model's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foreroute.ep.transfer.peers import answered


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
    with answered("comparing which gradients there are", host_group):
        dist.all_reduce(has_grad, dist.ReduceOp.MAX, group=host_group)
    grads = [_gradient(parameter) for parameter, has in zip(dense, has_grad.tolist(), strict=True) if has]
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        alike = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in alike])
        with answered("adding up gradients", group):
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
    with answered("adding up the norm of gradients", group):
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

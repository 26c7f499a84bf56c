"""Gradients over all ranks: those of dense parameters added up, and the norm of the whole model's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foreroute.experts.waiting import answered


def sum_gradients(dense: Sequence[nn.Parameter], group: dist.ProcessGroup, host_group: dist.ProcessGroup) -> None:
    """Add up the gradients of parameters that all ranks hold alike, in place.

    A parameter that has a gradient on one rank has one on all of them afterwards; others are left without.

    Args:
        dense: the same on all ranks, in the same order.
        group: the ranks, for the gradients.
        host_group: the same ranks, for tensors on the host.
    """
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
        dense: parameters whose gradients are the same on all ranks; they count once.
        experts: parameters of this rank.
        max_norm: of all gradients together.
        group: the ranks.

    Returns:
        The norm before, in float32, or float64 for parameters in float64.
    """
    there = [parameter.grad for parameter in [*dense, *experts] if parameter.grad is not None]
    squared = _squared_norm(experts)
    with answered("adding up the norm of gradients", group):
        dist.all_reduce(squared, group=group)
    norm = (squared + _squared_norm(dense)).sqrt()
    # the same small number as in torch.nn.utils.clip_grad_norm_
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in there:
        grad.mul_(scale.to(grad.dtype))
    return norm


def _squared_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    dtype = reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)
    squares = [parameter.grad.to(dtype).square().sum() for parameter in parameters if parameter.grad is not None]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=dtype, device=parameters[0].device)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad

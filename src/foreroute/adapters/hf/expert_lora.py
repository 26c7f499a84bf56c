"""LoRA of PEFT on experts that transformers has spread: an expert computes with W + s B A, where A and B are its own.

PEFT wraps an experts module once for each parameter that it adapts (`target_parameters`), and puts W + s B A of all
experts in its place while a forward runs, which does not run on sharded experts. Here its wrappers stay, so that
adapters are switched, merged, saved and loaded as ever; factors live where their expert does, and `ForerouteEP` adds
them up. What goes to a replica is W, A and B, and what comes back is the gradients of those that are trained.

Letters: E experts, G expert-parallel ranks, W ranks that hold each expert once, r rank of a factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor, distribute_tensor

from foreroute.adapters.hf.expert_parallel import SITE, ForerouteEP
from foreroute.core.untouched import reshard
from foreroute.errors import AttachError


def spread_adapters(model: nn.Module) -> nn.Module:
    """Leave on each rank the LoRA factors of its own experts. A collective call, after `peft.get_peft_model`.

    Before `hf.attach` and the optimizer: parameters of factors are replaced, by DTensors [E, r, in] and [E, out, r]
    that lie as the experts do. The first rank's factors count, as ranks may have drawn others. Gradients are the mean
    over ranks, like those of all that is sharded. `state_dict`, and so `save_pretrained`, gives factors whole and as
    PEFT lays them out, on all ranks, which call it together; loading takes the same. Call it again after adapters were
    added; calls without anything to spread are refused.

    Args:
        model: of PEFT, whose base was loaded with `ep_implementation="foreroute"`.

    Returns:
        The same model.

    Raises:
        AttachError: when no experts that we spread have LoRA, or what adapts them is no LoRA of single experts.
    """
    reshard(model)
    found = [
        (layer, wrapper)
        for path, layer in [
            (path, each.__dict__[SITE]) for path, each in model.named_modules() if SITE in each.__dict__
        ]
        for wrapper in _wrappers(model, path)
    ]
    if not found:
        raise AttachError(
            f"no experts of this {type(model).__name__} have adapters and are spread by foreroute; load the base with "
            'DistributedConfig(ep_implementation="foreroute"), and name experts in target_parameters of '
            "peft.get_peft_model"
        )
    for layer, wrapper in found:
        for factors in (wrapper.lora_A, wrapper.lora_B):
            for name, factor in factors.items():
                if not isinstance(factor, ExpertFactor):
                    factors[name] = ExpertFactor(factor.weight, wrapper.get_param(), layer, factors is wrapper.lora_B)
        if wrapper not in layer.wrappers:
            layer.wrappers.append(wrapper)
            wrapper._activate_lora = partial(_leave_to_layer, wrapper)
            wrapper.get_delta_weight = partial(_added_to, wrapper)
    return model


def require_spread_adapters(model: nn.Module, path: str) -> None:
    """Raise `AttachError` when adapters of the experts module at a path are as PEFT made them."""
    for wrapper in _wrappers(model, path):
        require_spread(wrapper, list(wrapper.lora_A))


def require_spread(wrapper: Any, names: list[str]) -> None:
    """Raise `AttachError` when one of these adapters is as PEFT made it."""
    if plain := [name for name in names if not isinstance(wrapper.lora_A[name], ExpertFactor)]:
        raise AttachError(
            f"adapter {plain[0]} of {wrapper.parameter_name} has the factors of all experts on this rank, which PEFT "
            "cannot add to experts that are spread; call hf.spread_adapters(model) after every adapter, and before "
            "hf.attach and the optimizer"
        )


class ExpertFactor(nn.Module):
    """A factor of an adapter, which lies as the experts do.

    Args:
        plain: [E * r, in], the rows of an expert beside each other; or [out, r * E], its columns E apart.
        experts: [E, ...], the parameter that is adapted.
        layer: of the experts.
        is_left: whether it is the second of these.

    Attributes:
        weight: [E, r, in] or [E, out, r].
    """

    def __init__(self, plain: nn.Parameter, experts: DTensor, layer: ForerouteEP, is_left: bool) -> None:
        super().__init__()
        self._is_left, self._num_experts = is_left, len(experts)
        # ranks of a tensor-parallel group have a batch together
        self._num_batches = experts.device_mesh.size() // layer.slices[1]
        spread = distribute_tensor(self._stacked(plain.detach()), experts.device_mesh, experts.placements)
        self.weight = nn.Parameter(spread, requires_grad=plain.requires_grad)

    def of_group(self) -> Tensor:
        """[E / G, ...], those of this rank's experts in a pass."""
        weight: Any = self.weight
        are_copies = [each.is_replicate() for each in weight.placements[:-1]]
        gathered: Tensor = OfGroup.apply(weight.to_local(), weight.device_mesh, are_copies, self._num_batches)
        return gathered

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        weight: Any = self.weight
        whole = weight.detach().full_tensor()
        plain = whole.movedim(0, 2).flatten(1) if self._is_left else whole.flatten(0, 1)
        destination[f"{prefix}weight"] = plain.contiguous()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight: Any = self.weight
        plain = state_dict.get(f"{prefix}weight")
        if plain is not None:
            stacked = self._stacked(plain.to(weight.device))
            state_dict[f"{prefix}weight"] = distribute_tensor(
                stacked, weight.device_mesh, weight.placements, src_data_rank=None
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _stacked(self, plain: Tensor) -> Tensor:
        if self._is_left:
            return plain.unflatten(1, (-1, self._num_experts)).movedim(2, 0).contiguous()
        return plain.unflatten(0, (self._num_experts, -1))


class OfGroup(Function):
    """`OfGroup.apply(local, mesh, are_copies, num_batches)`: [E / W, ...] to [E / G, ...], gathered between groups.

    Gradients are added up between the groups that hold the same experts, and divided by the number of batches.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: Any, are_copies: list[bool], num_batches: int) -> Tensor:
        ctx.groups = [(mesh.get_group(dim), mesh.size(dim), is_copy) for dim, is_copy in enumerate(are_copies)]
        ctx.num_batches = num_batches
        whole = local.view_as(local)
        for group, size, is_copy in ctx.groups:
            if size > 1 and not is_copy:
                part, whole = whole, whole.new_empty((size * len(whole), *whole.shape[1:]))
                dist.all_gather_into_tensor(whole, part, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = grads[0] / ctx.num_batches
        for group, size, is_copy in ctx.groups:
            if size > 1 and is_copy:
                dist.all_reduce(total, group=group)
            elif size > 1:
                whole, total = total.contiguous(), total.new_empty((len(total) // size, *total.shape[1:]))
                dist.reduce_scatter_tensor(total, whole, group=group)
        return total, None, None, None


def _wrappers(model: nn.Module, path: str) -> Iterator[Any]:
    """Around the experts module at a path, from the inside.

    Raises:
        AttachError: when one is not LoRA of every expert on its own.
    """
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
        wrapper: Any = model.get_submodule(path)
        if not hasattr(wrapper, "_activate_lora"):
            raise AttachError(
                f"{path} is wrapped by a {type(wrapper).__name__}; over ranks experts can have the LoRA that PEFT 0.21 "
                "puts on target_parameters, merge others first"
            )
        if wrapper.get_param().dim() != 3:
            raise AttachError(
                f"{path}.{wrapper.parameter_name} is adapted as one matrix, expected one for each expert; name "
                "gate_up_proj, up_proj or down_proj in target_parameters"
            )
        yield wrapper


def _leave_to_layer(wrapper: Any, active: list[str]) -> AbstractContextManager[None]:
    require_spread(wrapper, [name for name in active if name in wrapper.lora_A])
    return nullcontext()


def _added_to(wrapper: Any, name: str) -> DTensor:
    """What an adapter adds to a parameter, [E, ...], to merge it."""
    experts = wrapper.get_param()
    left, right = (factors[name].weight.detach().to_local() for factors in (wrapper.lora_B, wrapper.lora_A))
    added = (left @ right if wrapper._did_swap_in_out_features else right.mT @ left.mT) * wrapper.scaling[name]
    return DTensor.from_local(
        added.to(experts.dtype),
        experts.device_mesh,
        experts.placements,
        run_check=False,
        shape=experts.shape,
        stride=experts.stride(),
    )

"""LoRA of PEFT on experts that transformers has spread: an expert computes with W + s B A, where A and B are its own.

PEFT's wrappers stay around the experts, so that adapters are switched, merged, saved and loaded as ever. Factors live
where their expert does, and `ForerouteEP` adds their product to W where experts compute.

E experts, G expert-parallel ranks, W ranks that own each expert once, r rank of a factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor, distribute_tensor

from foreroute.adapters.hf.expert_parallel import SITE, ForerouteEP
from foreroute.core.untouched import reshard
from foreroute.errors import AttachError


def spread_adapters(model: nn.Module) -> nn.Module:
    """Leave on each rank the LoRA factors of its own experts. A collective call, after `peft.get_peft_model`.

    Call it before `hf.attach` and before the optimizer is made, and again when adapters are added: factors become new
    parameters, DTensors [E, r, in] and [E, out, r] that lie as the experts do. Those of the first rank count. Their
    gradients are the mean over ranks. `state_dict`, and so `save_pretrained`, is a collective call from then on, which
    gives factors whole and as PEFT lays them out; loading takes the same.

    Args:
        model: of PEFT, its base loaded with `ep_implementation="foreroute"`; it is returned.

    Raises:
        AttachError: when no experts that are spread have adapters, or have others than LoRA of their matrices.
        PlacementError: while experts have moved, to where factors of all experts would not follow them.
    """
    reshard(model)
    wrapped = [(layer, wrapper) for layer in _find_layers(model) for wrapper in layer.wrappers]
    if not wrapped:
        raise AttachError(
            f"no experts of this {type(model).__name__} have adapters and are spread by foreroute; load the base with "
            'DistributedConfig(ep_implementation="foreroute"), and name experts in target_parameters'
        )
    for layer, wrapper in wrapped:
        if layer.spread is not None:
            layer.spread.require_block_homes()
        for factors in (wrapper.lora_A, wrapper.lora_B):
            for name, factor in factors.items():
                if not isinstance(factor, ExpertFactor):
                    is_left = factors is wrapper.lora_B
                    factors[name] = ExpertFactor(factor.weight, wrapper.get_param(), layer, is_left)
        wrapper._activate_lora = partial(_activate_in_layer, layer, wrapper)
        wrapper.get_delta_weight = partial(_compute_delta, wrapper)
    return model


def require_adapters_spread(model: nn.Module) -> None:
    """Raise `AttachError` when experts that are spread have adapters as PEFT made them."""
    for layer in _find_layers(model):
        for wrapper in layer.wrappers:
            _require_spread(wrapper, wrapper.lora_A)


class ExpertFactor(nn.Module):
    """A factor of an adapter, which lies as the experts do: a DTensor [E, r, in], or [E, out, r] where it `is_left`.

    PEFT's is [E * r, in], the rows of an expert beside each other; or [out, r * E], where expert e has columns e,
    E + e, 2 E + e, ...
    """

    weight: Any

    def __init__(self, plain: nn.Parameter, experts: DTensor, layer: ForerouteEP, is_left: bool) -> None:
        super().__init__()
        self._is_left, self._num_experts = is_left, len(experts)
        self._num_batches = experts.device_mesh.size() // layer.slices[1]
        spread = distribute_tensor(self._stack(plain.detach()), experts.device_mesh, experts.placements)
        self.weight = nn.Parameter(spread, requires_grad=plain.requires_grad)

    def gather_group(self) -> Tensor:
        """Gather those of this rank's experts in a pass, [E / G, ...]."""
        are_copies = [each.is_replicate() for each in self.weight.placements[:-1]]
        gathered: Tensor = GatherGroup.apply(
            self.weight.to_local(), self.weight.device_mesh, are_copies, self._num_batches
        )
        return gathered

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        whole = self.weight.detach().full_tensor()
        plain = whole.movedim(0, 2).flatten(1) if self._is_left else whole.flatten(0, 1)
        destination[f"{prefix}weight"] = plain.contiguous()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key, mesh = f"{prefix}weight", self.weight.device_mesh
        if key in state_dict:
            stacked = self._stack(state_dict[key].to(self.weight.device))
            state_dict[key] = distribute_tensor(stacked, mesh, self.weight.placements, src_data_rank=None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _stack(self, plain: Tensor) -> Tensor:
        if self._is_left:
            return plain.unflatten(1, (-1, self._num_experts)).movedim(2, 0).contiguous()  # type: ignore[no-any-return]
        return plain.unflatten(0, (self._num_experts, -1))  # type: ignore[no-any-return]


class GatherGroup(Function):
    """`GatherGroup.apply(local, mesh, are_copies, num_batches)`: [E / W, ...] to [E / G, ...], between groups."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: Any, are_copies: list[bool], num_batches: int) -> Tensor:
        dims = [dim for dim in range(len(are_copies)) if mesh.size(dim) > 1]
        ctx.groups, ctx.num_batches = [(mesh.get_group(dim), are_copies[dim]) for dim in dims], num_batches
        whole = local.view_as(local)
        for group, is_copy in ctx.groups:
            if not is_copy:
                part, whole = whole, whole.new_empty((group.size() * len(whole), *whole.shape[1:]))
                dist.all_gather_into_tensor(whole, part, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # the mean over batches: each group that holds the same experts has seen others
        total = (grads[0] / ctx.num_batches).contiguous()
        for group, is_copy in ctx.groups:
            if is_copy:
                dist.all_reduce(total, group=group)
            else:
                whole, total = total, total.new_empty((len(total) // group.size(), *total.shape[1:]))
                dist.reduce_scatter_tensor(total, whole, group=group)
        return total, None, None, None


@contextmanager
def _activate_in_layer(layer: ForerouteEP, wrapper: Any, active: list[str]) -> Iterator[None]:
    """Tell the layer which adapters are on, where PEFT would add them to the weights of a forward."""
    names = [name for name in active if name in wrapper.lora_A]
    _require_spread(wrapper, names)
    before = layer.active
    layer.active = [*before, *((wrapper, name) for name in names)]
    try:
        yield
    finally:
        layer.active = before


def _compute_delta(wrapper: Any, name: str) -> DTensor:
    """Compute what an adapter adds to a parameter, [E, ...], where it is merged."""
    experts = wrapper.get_param()
    left, right = (factors[name].weight.detach().to_local() for factors in (wrapper.lora_B, wrapper.lora_A))
    added = (left @ right if wrapper._did_swap_in_out_features else right.mT @ left.mT) * wrapper.scaling[name]
    return DTensor.from_local(added.to(experts.dtype), experts.device_mesh, experts.placements, run_check=False)


def _find_layers(model: nn.Module) -> list[ForerouteEP]:
    """Find layers whose experts are spread, and the wrappers of PEFT around them; refuse what is no LoRA of theirs."""
    layers = []
    for path, module in model.named_modules():
        if SITE not in module.__dict__:
            continue
        layer: ForerouteEP = module.__dict__[SITE]
        layer.wrappers = []
        while path.endswith(".base_layer"):
            path = path.removesuffix(".base_layer")
            wrapper: Any = model.get_submodule(path)
            if not hasattr(wrapper, "_activate_lora") or wrapper.get_param().dim() != 3:
                raise AttachError(
                    f"{path} is wrapped by {type(wrapper).__name__} of {getattr(wrapper, 'parameter_name', 'a module')}"
                    "; expected LoRA of PEFT 0.21 on gate_up_proj, up_proj or down_proj by target_parameters"
                )
            layer.wrappers.append(wrapper)
        layers.append(layer)
    return layers


def _require_spread(wrapper: Any, names: Iterable[str]) -> None:
    """Raise `AttachError` when one of these adapters is as PEFT made it."""
    for name in names:
        if not isinstance(wrapper.lora_A[name], ExpertFactor):
            raise AttachError(
                f"adapter {name} of {wrapper.parameter_name} has the factors of all experts here, where only some "
                "experts are; call hf.spread_adapters(model) once it is there, before hf.attach and the optimizer"
            )

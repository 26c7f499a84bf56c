"""Parameters of each expert of a layer on this rank, and the state that Megatron's optimizers have for them.

What is not known is refused: a tensor that stays behind would go on as another expert's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.ep.transfer.home_moves import HeldTensor, MovingLayer
from foreroute.errors import TransferError

PARAMETERS = {
    SequentialMLP: re.compile(r"local_experts\.(?P<number>\d+)\.(?P<name>.+)"),
    TEGroupedMLP: re.compile(r"(?P<name>linear_fc[12]\.(?:weight|bias))(?P<number>\d+)"),
}
"""Experts modules whose parameters belong to one expert each, and how their names say to which."""
MAIN = "main parameter"


def inspect_experts(sites: Sequence[ChunkRouter], optimizer: Any) -> list[MovingLayer]:
    """Find what there is to move, without a change, or raise `TransferError` when it cannot be moved."""
    state: OptimizerState = {} if optimizer is None else optimizer_state(optimizer)
    moving = []
    for site in sites:
        experts = movable_parameters(site)
        parameters = [(name, p) for expert in experts for name, p in expert.items()]
        if optimizer is not None and (left := {name for name, p in parameters if p.requires_grad and p not in state}):
            raise TransferError(
                f"{min(left)} of the experts of {site.path} is trained, and is no parameter of the optimizer; pass "
                "the one that trains this model"
            )
        counts = frozenset(count for _, p in parameters if p in state for count in state[p].counts)
        moving.append(MovingLayer(site.path, [held_tensors(expert, state) for expert in experts], counts))
    return moving


def parameters_of_experts(experts: Any) -> list[dict[str, nn.Parameter]]:
    """Find the parameters of each local expert by name, whole, or raise `TransferError` where they are not known."""
    known = " or ".join(each.__name__ for each in PARAMETERS)
    if type(experts) not in PARAMETERS:
        raise TransferError(f"its experts are a {type(experts).__name__}; build the layer with {known}")
    found: list[dict[str, nn.Parameter]] = [{} for _ in range(experts.num_local_experts)]
    for name, parameter in experts.named_parameters():
        match = PARAMETERS[type(experts)].fullmatch(name)
        if match is None or int(match["number"]) >= len(found):
            raise TransferError(
                f"its experts have {name}, of which it is not known whose it is; use {known} with parameters of one "
                "expert each: moe_single_grouped_weight=False, and no adapters"
            )
        if isinstance(parameter, DTensor) or hasattr(parameter, "__fsdp_param__") or not parameter.is_contiguous():
            raise TransferError(
                f"{name} of its experts is sharded by FSDP, or not contiguous, so no rank has a whole expert to send; "
                "wrap it in DDP"
            )
        found[int(match["number"])][match["name"]] = parameter
    if any(each.keys() != found[0].keys() for each in found):
        raise TransferError("its experts have different parameters; build the layer with experts that are alike")
    return found


def movable_parameters(site: ChunkRouter) -> list[dict[str, nn.Parameter]]:
    """Find the parameters of each local expert of a layer by name, or raise `TransferError` if they cannot move."""
    block, what = site.block, f"the layer of {site.path}"
    if objection := objection_to_class(block, ("forward", "preprocess")):
        raise TransferError(f"{what}: {objection}")
    if buffers := [name for name, _ in block.experts.named_buffers()]:
        raise TransferError(f"{what}: experts have a buffer, {buffers[0]}, which would stay behind; move none")
    if block.config.fp8 or getattr(block.config, "fp4", None):
        raise TransferError(
            f"{what}: experts run in fp8 or fp4, whose scaling factors belong to parameters and would stay behind; "
            "train in bf16 to move homes"
        )
    try:
        found = parameters_of_experts(block.experts)
    except TransferError as error:
        raise TransferError(f"{what}: {error}") from error
    if having := [name for expert in found for name, parameter in expert.items() if _has_gradient(parameter)]:
        raise TransferError(
            f"{what}: {having[0]} has a gradient; move homes between two steps, after zero_grad() of the optimizer and "
            "zero_grad_buffer() of DistributedDataParallel"
        )
    return found


def objection_to_class(block: Any, methods: Iterable[str]) -> str | None:
    """Say that a layer has one of these methods of MoELayer as its own; None where it has not."""
    for name in methods:
        if getattr(type(block), name, None) is not getattr(MoELayer, name):
            return f"it is a {type(block).__name__} with a {name} of its own, so it is not known where it dispatches"
    return None


def _has_gradient(parameter: nn.Parameter) -> bool:
    # Megatron's buffers hold zeros between two steps
    grads: list[Tensor | None] = [parameter.grad, getattr(parameter, "main_grad", None)]
    return any(grad is not None and bool(grad.any()) for grad in grads)


class ParameterState(NamedTuple):
    """State that an optimizer keeps for one parameter on this rank."""

    tensors: dict[str, HeldTensor]  # by name
    counts: tuple[tuple[str, float], ...] = ()  # state without dimensions, such as the number of steps


OptimizerState = dict[nn.Parameter, ParameterState]


def optimizer_state(optimizer: Any) -> OptimizerState:
    """Find what an optimizer of torch or of Megatron keeps for each parameter of the model that it trains."""
    state: OptimizerState = {}
    for part in chained(optimizer):
        read = READERS.get(type(part))
        if read is None:
            read = _read_plain if isinstance(part, Optimizer) else None
        if read is None or isinstance(torch_optimizer(part), HybridDeviceOptimizer):
            raise TransferError(
                f"it is not known where a {type(part).__name__} keeps its state; homes move with optimizers of torch, "
                "and with FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer and chains of them"
            )
        # a stub trains nothing on this rank
        state.update({} if getattr(part, "is_stub_optimizer", False) else read(part))
    return state


def held_tensors(
    expert: Mapping[str, nn.Parameter], state: Mapping[nn.Parameter, ParameterState]
) -> dict[str, HeldTensor]:
    """List the parameters of one expert and what the optimizer keeps for them, which are on one device, by name."""
    held = {}
    for name, parameter in expert.items():
        held[name] = HeldTensor.of(parameter.detach().view(-1))
        kept = state.get(parameter, ParameterState({}))
        for key, each in kept.tensors.items():
            if each.tensor.device != parameter.device:
                raise TransferError(
                    f"{key} of {name} is on {each.tensor.device} and the parameter on {parameter.device}; bring what "
                    "was offloaded back before homes are moved"
                )
            held[f"{name}, {key}"] = each
    return held


def chained(optimizer: Any) -> list[Any]:
    """List the optimizers of a chain, and of chains in it; any other one alone."""
    if type(optimizer) is ChainedOptimizer:
        return [part for each in optimizer.chained_optimizers for part in chained(each)]
    return [optimizer]


def torch_optimizer(part: Any) -> Any:
    """Find the optimizer of torch in one of Megatron."""
    return part.optimizer if isinstance(part, MegatronOptimizer) else part


def _read_plain(optimizer: Any) -> OptimizerState:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {parameter: _state_of(optimizer.state.get(parameter, {})) for parameter in parameters}


def _read_float16(optimizer: Any) -> OptimizerState:
    kept, state = optimizer.optimizer.state, {}
    for parameter, main in _pair_up(optimizer.float16_groups, optimizer.fp32_from_float16_groups):
        state[parameter] = _state_of(kept.get(main, {}), {MAIN: main.detach().view(-1)})
    for parameter in (p for group in optimizer.fp32_from_fp32_groups for p in group):
        state[parameter] = _state_of(kept.get(parameter, {}))
    return state


def _read_distributed(optimizer: Any) -> OptimizerState:
    _require_in_place(optimizer)
    # each rank has a range of each parameter, or nothing of it, which it says too
    state = {parameter: ParameterState({}) for buffer in optimizer.buffers for parameter in buffer.params}
    shards = [
        *((*pair, True) for pair in _pair_up(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups)),
        *((*pair, False) for pair in _pair_up(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)),
    ]
    for parameter, shard, is_copy in shards:
        main = {MAIN: shard.detach()} if is_copy else {}  # a shard that is no copy lies in the parameter
        start = optimizer._get_model_param_range_map(parameter)["param"].start
        state[parameter] = _state_of(optimizer.optimizer.state.get(shard, {}), main, start, parameter.numel())
    return state


def _require_in_place(optimizer: Any) -> None:
    setting = None
    if optimizer.ddp_config.use_megatron_fsdp:
        setting = "use_megatron_fsdp shards parameters"
    elif optimizer.config.use_precision_aware_optimizer:
        setting = "use_precision_aware_optimizer keeps scaled state in the optimizer of Transformer Engine"
    if setting is not None:
        raise TransferError(f"{setting}, where homes cannot be moved; train without it")
    if any(chunk.remove_forward_pre_hook_handles for chunk in optimizer.model_chunks):
        raise TransferError(
            "overlap_param_gather leaves weights to be gathered in the next forward; call disable_forward_pre_hook() "
            "of each model chunk before homes are moved, and enable_forward_pre_hook() after"
        )


READERS: dict[type, Callable[[Any], OptimizerState]] = {
    FP32Optimizer: lambda optimizer: _read_plain(optimizer.optimizer),
    Float16OptimizerWithFloat16Params: _read_float16,
    DistributedOptimizer: _read_distributed,
}
"""By class, and not by what they inherit: a subclass may keep more."""


def _pair_up(groups: list[list[Any]], others: list[list[Any]]) -> Iterator[tuple[Any, Any]]:
    for group, other in zip(groups, others, strict=True):
        yield from zip(group, other, strict=True)


def _state_of(
    kept: dict[str, Any], main: Mapping[str, Tensor] | None = None, start: int = 0, whole: int | None = None
) -> ParameterState:
    """Tell tensors with dimensions, flattened, from the rest of what is kept, which must be numbers."""
    tensors, counts = {name: HeldTensor.of(tensor, start, whole) for name, tensor in (main or {}).items()}, []
    for name, value in kept.items():
        if isinstance(value, Tensor) and value.dim():
            if not value.is_contiguous():
                raise TransferError(f"{name} in the state of the optimizer is not contiguous, so it cannot be moved")
            tensors[name] = HeldTensor.of(value.detach().view(-1), start, whole)
        elif value is not None:  # such as the momentum of SGD without momentum
            counts.append((name, float(value)))
    return ParameterState(tensors, tuple(sorted(counts)))

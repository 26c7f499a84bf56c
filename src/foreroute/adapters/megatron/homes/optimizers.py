"""What an optimizer keeps for each parameter: master weights and state, wherever Megatron's optimizers put them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from foreroute.errors import TransferError

MAIN = "main parameter"


@dataclass(frozen=True)
class Kept:
    """What is kept for one parameter on this rank.

    Attributes:
        tensors: flattened, by name.
        start: the element of the flattened parameter that they begin at.
        whole: elements of the parameter that they would have if nothing were sharded; None where they are whole.
        counts: state without dimensions, such as the number of steps.
    """

    tensors: dict[str, Tensor]
    start: int = 0
    whole: int | None = None
    counts: tuple[tuple[str, float], ...] = ()


State = dict[nn.Parameter, Kept]


def optimizer_state(optimizer: Any) -> State:
    """What an optimizer keeps for each parameter of the model that it trains.

    Args:
        optimizer: of torch or of Megatron.

    Raises:
        TransferError: for optimizers of other kinds, and settings under which state is kept elsewhere.
    """
    state: State = {}
    for part in _chained(optimizer):
        read = READERS.get(type(part))
        if read is None:
            read = _plain if isinstance(part, Optimizer) else None
        if read is None or isinstance(_inner(part), HybridDeviceOptimizer):
            raise TransferError(
                f"it is not known where a {type(part).__name__} keeps its state; homes move with optimizers of torch, "
                "and with FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer and chains of them"
            )
        state.update(read(part))
    return state


def inner_optimizers(optimizer: Any) -> list[Optimizer]:
    """The optimizers of torch inside, whose `state_dict` every other one is made from."""
    return [inner for part in _chained(optimizer) if isinstance(inner := _inner(part), Optimizer)]


def _chained(optimizer: Any) -> list[Any]:
    if type(optimizer) is ChainedOptimizer:
        return [part for each in optimizer.chained_optimizers for part in _chained(each)]
    return [optimizer]


def _inner(part: Any) -> Any:
    return part.optimizer if isinstance(part, MegatronOptimizer) else part


def _plain(optimizer: Any) -> State:
    state = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors, counts = _split(optimizer.state.get(parameter, {}))
            state[parameter] = Kept(tensors, counts=counts)
    return state


def _float32(optimizer: Any) -> State:
    return {} if optimizer.is_stub_optimizer else _plain(optimizer.optimizer)


def _float16(optimizer: Any) -> State:
    if optimizer.is_stub_optimizer:
        return {}
    state = {}
    for parameter, main in _pairs(optimizer.float16_groups, optimizer.fp32_from_float16_groups):
        tensors, counts = _split(optimizer.optimizer.state.get(main, {}))
        state[parameter] = Kept({MAIN: main.detach().view(-1), **tensors}, counts=counts)
    for parameter in (p for group in optimizer.fp32_from_fp32_groups for p in group):
        tensors, counts = _split(optimizer.optimizer.state.get(parameter, {}))
        state[parameter] = Kept(tensors, counts=counts)
    return state


def _distributed(optimizer: Any) -> State:
    """Each rank has a range of each parameter, or nothing of it."""
    if optimizer.is_stub_optimizer:
        return {}
    _require_in_place(optimizer)
    # of what this rank has no range of, too
    state: State = {parameter: Kept({}) for buffer in optimizer.buffers for parameter in buffer.params}
    shards = [
        *((*pair, True) for pair in _pairs(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups)),
        *((*pair, False) for pair in _pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)),
    ]
    for parameter, shard, is_copy in shards:
        tensors, counts = _split(optimizer.optimizer.state.get(shard, {}))
        main = {MAIN: shard.detach()} if is_copy else {}  # a shard that is no copy lies in the parameter
        owned = optimizer._get_model_param_range_map(parameter)["param"]
        state[parameter] = Kept({**main, **tensors}, owned.start, parameter.numel(), counts)
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


READERS: dict[type, Callable[[Any], State]] = {
    FP32Optimizer: _float32,
    Float16OptimizerWithFloat16Params: _float16,
    DistributedOptimizer: _distributed,
}
"""By class, and not by what they inherit: a subclass may keep more."""


def _pairs(groups: list[list[Any]], others: list[list[Any]]) -> Iterator[tuple[Any, Any]]:
    for group, other in zip(groups, others, strict=True):
        yield from zip(group, other, strict=True)


def _split(kept: dict[str, Any]) -> tuple[dict[str, Tensor], tuple[tuple[str, float], ...]]:
    """Tensors with dimensions, flattened, and the rest, which must be numbers."""
    tensors, counts = {}, []
    for name, value in kept.items():
        if isinstance(value, Tensor) and value.dim():
            if not value.is_contiguous():
                raise TransferError(f"{name} in the state of the optimizer is not contiguous, so it cannot be moved")
            tensors[name] = value.detach().view(-1)
        elif value is not None:  # such as the momentum of SGD without momentum
            counts.append((name, float(value)))
    return tensors, tuple(sorted(counts))

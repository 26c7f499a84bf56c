"""The replicas of one MoE layer of Megatron, whose experts have parameters of their own.

A replica is computed by the code that computes homes, with what is in a slot in the place of parameters.

`WaitGrads` adds gradients of replicas to `main_grad` in its dtype, float32 as a rule. DistributedDataParallel counts a
gradient as ready on AccumulateGrad of its parameter, which comes after: whatever bucket is reduced then has them all.
N rows, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn
from torch.func import functional_call

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.adapters.megatron.expert_parameters import parameters_of_experts
from foreroute.ep.replicas import Replicas
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.ep.transfer.gradients import wide_dtype
from foreroute.errors import TransferError

RunReplicas = Callable[[Sequence[Mapping[str, Tensor]], Tensor, Tensor, Sequence[int]], list[Tensor]]
"""`run(weights, rows_ND, probs_N, sizes)`: name -> tensor of each replica, rows and gate weights in order of replica,
rows of each. Returns what comes out, in that order, in one tensor or several."""


class SeparateReplicas(Replicas):
    """Replicas beside experts that have parameters of their own."""

    computes_views = False

    def __init__(
        self,
        cell: Cell,
        engine: TransferEngine,
        home: Mapping[str, Sequence[nn.Parameter]],  # name -> that of each home expert, in ascending order of its id
        *,
        num_replicas: int | None,  # of the cell, on this rank; None where no rank has one
        fuses_gradients: bool,  # whether kernels add the gradient of a weight to its `main_grad` and return none
    ) -> None:
        # Cells without replicas have the same nodes: buckets get ready in an order that follows from the nodes, and
        # groups of expert data parallelism, which reduce buckets together, have plans of their own.
        super().__init__(cell, engine, on_any_rank=num_replicas is not None)
        self.home = home
        self._num = num_replicas or 0
        self._fuses_gradients = fuses_gradients
        self._fused: list[Tensor] = []

    def parameters(self) -> list[Tensor]:
        # expert after expert, as buckets have them
        return list(chain.from_iterable(zip(*self.home.values(), strict=True)))

    def graph_inputs(self) -> list[Tensor]:
        # name after name, and of each replica after replica; a view would keep what it is a view of, emptied or not
        return [row.data for name in self.home for row in self.weights.get(name, ())]

    def run(
        self,
        token: Tensor,
        inputs: Sequence[Any],
        run_replicas: RunReplicas,
        rows: Tensor,
        probs: Tensor,
        sizes: Sequence[int],
    ) -> list[Tensor]:
        """Run the replicas here, each on its part of the rows [N, D], which are in order of slot."""
        if not self._num:
            return []
        if self._fuses_gradients:
            self._fused = [torch.zeros_like(weight, dtype=self._gradient_dtype(weight)) for weight in inputs]
            for weight, main_grad in zip(inputs, self._fused, strict=True):
                weight.main_grad = main_grad
        weights = [dict(zip(self.home, inputs[i :: self._num], strict=True)) for i in range(self._num)]
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            computed = run_replicas(weights, rows, probs, sizes)
        if self._fuses_gradients:
            for weight in inputs:
                # Transformer Engine finds main_grad through the tensor, and would keep what is in the slot with it
                weight.data = weight.new_empty(0)
        return computed

    def grads_to_return(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        found, self._fused = self._fused if self._fuses_gradients else grads, []
        returned = {}
        for i, name in enumerate(self.home):
            rows = self.weights[name]
            own = found[i * self._num : (i + 1) * self._num]
            of_all = [rows.new_zeros(rows.shape[1:]) if grad is None else grad for grad in own]
            returned[name] = torch.stack(of_all) if of_all else rows.to(self._gradient_dtype(rows))
        return returned

    def add_returned(
        self, returned: dict[str, dict[int, Tensor]], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for row, of_one in enumerate(zip(*self.home.values(), strict=True)):
            for name, parameter in zip(self.home, of_one, strict=True):
                grad, main_grad = returned.get(name, {}).get(row), getattr(parameter, "main_grad", None)
                if grad is not None and main_grad is not None:
                    # autograd would round it, and what it brings after fused kernels Megatron ignores
                    main_grad.add_(grad)
                    grad = None
                found.append(None if grad is None else grad.to(parameter.dtype))
        return found

    def _gradient_dtype(self, weight: Tensor) -> torch.dtype:
        # kernels that add to `main_grad` make gradients in float32, others in what they compute in
        return wide_dtype(weight.dtype) if self._fuses_gradients else weight.dtype

    def _pack(self, tensor: Tensor) -> Any:
        """Have autograd save, in place of a fetched weight or a view of it, where it lies in the slots."""
        assert self.weights, "replicas compute before weights are released"
        for name, weights in self.weights.items():
            if tensor.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr() and tensor.numel():
                return name, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert self.weights, "FetchWeights runs before backward of what replicas computed"
        name, size, stride, offset = packed
        return self.weights[name].as_strided(size, stride, offset)


def home_parameters(site: ChunkRouter) -> dict[str, list[nn.Parameter]]:
    """Collect the parameters of a layer's home experts by name, in ascending order of their ids."""
    found = parameters_of_experts(site.block.experts)
    return {name: [expert[name] for expert in found] for name in found[0]}


def replica_runner(experts: Any) -> RunReplicas:
    """Give what runs replicas beside an experts module; to be kept, since it keeps modules."""
    if type(experts) is not TEGroupedMLP:
        return partial(_run_each, experts.local_experts[0])
    return partial(_run_grouped, cache(partial(_grouped_beside, experts)))


def _run_each(
    expert: nn.Module, weights: Sequence[Mapping[str, Tensor]], rows: Tensor, probs: Tensor, sizes: Sequence[int]
) -> list[Tensor]:
    parts = zip(weights, rows.split(list(sizes)), probs.split(list(sizes)), strict=True)
    return [functional_call(expert, dict(of_one), (own, own_probs))[0] for of_one, own, own_probs in parts]


def _run_grouped(
    module_of: Callable[[int], nn.Module],
    weights: Sequence[Mapping[str, Tensor]],
    rows: Tensor,
    probs: Tensor,
    sizes: Sequence[int],
) -> list[Tensor]:
    named = {f"{name}{i}": weight for i, of_one in enumerate(weights) for name, weight in of_one.items()}
    return [functional_call(module_of(len(weights)), named, (rows, torch.tensor(sizes), probs))[0]]


def _grouped_beside(experts: Any, num_gemms: int) -> nn.Module:
    """Make another TEGroupedMLP, with as many gemms as a cell has replicas here."""
    # The layer's own cannot be made larger: `num_gemms` goes into checkpoints, and home weights must stay the
    # parameters that Transformer Engine leaves its marks on.
    config = copy.copy(experts.config)
    # neither memory nor random numbers for parameters that are never used
    config.use_cpu_initialization, config.init_model_with_meta_device = False, True
    # nothing may be kept by the name of a weight: in the next pass it is another one
    config.disable_parameter_transpose_cache = True
    fc1, fc2 = experts.linear_fc1, experts.linear_fc2
    submodules = SimpleNamespace(linear_fc1=type(fc1), linear_fc2=type(fc2), activation_func=None)
    beside: Any = TEGroupedMLP(num_gemms, config, submodules, pg_collection=fc1._pg_collection)
    beside.activation_func = experts.activation_func
    made: nn.Module = beside
    return made


def objection_to_experts(experts: Any) -> str | None:
    """Say why replicas of a layer's experts cannot be computed, or None."""
    try:
        found = parameters_of_experts(experts)
    except TransferError as error:
        return str(error)
    for name, parameter in ((name, each) for expert in found for name, each in expert.items()):
        if not parameter.requires_grad:
            return f"{name} of its experts is frozen, and gradients of replicas have no place to go; train all of them"
    return _objection_to_grouped(experts) if type(experts) is TEGroupedMLP else _objection_to_sequential(experts)


def _objection_to_sequential(experts: Any) -> str | None:
    for linear in (experts.local_experts[0].linear_fc1, experts.local_experts[0].linear_fc2):
        if type(linear) not in (ColumnParallelLinear, RowParallelLinear):
            return (
                f"its experts are made of {type(linear).__name__}, which keeps state for each of its weights; use the "
                "local spec (use_transformer_engine=False), or TEGroupedMLP (moe_grouped_gemm=True)"
            )
    return None


def _objection_to_grouped(experts: Any) -> str | None:
    if getattr(experts, "_with_fused_impl", False):
        return "use_transformer_engine_op_fuser is set: its operations hold parameters and no slots; switch it off"
    if experts.offload_expert_fc1 or experts.offload_moe_act:
        return (
            "offload_modules names expert_fc1 or moe_act, which Megatron counts by layer, and replicas would be one "
            "more; offload other modules"
        )
    return None

"""The replicas of one MoE layer of Megatron, whose experts have parameters of their own.

`WaitGrads` adds gradients of replicas to `main_grad` in its dtype, float32 as a rule. DistributedDataParallel counts a
gradient as ready on AccumulateGrad of its parameter, which comes after: whatever bucket is reduced has all gradients.
Cells without replicas have the same nodes, since the order in which buckets get ready follows from the nodes, and
groups of expert data parallelism, which reduce buckets together, have plans of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreroute.adapters.megatron.plan_execution.experts import RunReplicas
from foreroute.ep.replicas import Replicas
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.plan.schedule import CellSchedule


class SeparateReplicas(Replicas):
    """Replicas beside experts that have parameters of their own.

    Args:
        cell, engine: as in `Replicas`.
        home: name -> the parameter of each home expert of the layer, in ascending order of its id.
        moves: of the cell, on this rank; None where no rank has a replica.
        fuses_gradients: whether kernels add the gradient of a weight to its `main_grad` and return none.
    """

    def __init__(
        self,
        cell: Cell,
        engine: TransferEngine,
        home: Mapping[str, Sequence[nn.Parameter]],
        moves: CellSchedule | None,
        *,
        fuses_gradients: bool,
    ) -> None:
        super().__init__(cell, engine, home, hosted=moves is not None)
        self.home = home
        self._num = 0 if moves is None else len(moves.hosted)
        self._fuses_gradients = fuses_gradients
        self._fused: list[Tensor] = []

    def parameters(self) -> list[Tensor]:
        # expert after expert, as buckets have them
        return [parameter for of_one in zip(*self.home.values(), strict=True) for parameter in of_one]

    def graph_inputs(self) -> list[Tensor]:
        # name after name, and of each replica after replica; a view would keep what it is a view of, emptied or not
        return [row.data for name in self.home for row in self.weights.get(name, ())]

    def run(
        self, inputs: Sequence[Any], run_replicas: RunReplicas, rows: Tensor, probs: Tensor, sizes: Sequence[int]
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
        own = [
            torch.zeros_like(weight) if grad is None else grad
            for weight, grad in zip(self.graph_inputs(), found, strict=True)
        ]
        num = self._num
        return {
            name: torch.stack(own[n * num : (n + 1) * num]) if num else rows.to(self._gradient_dtype(rows))
            for n, (name, rows) in enumerate((name, self.weights[name]) for name in self.home)
        }

    def add_returned(
        self, returned: dict[str, dict[int, Tensor]], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        num_home = len(next(iter(self.home.values())))
        for row, (name, parameters) in ((row, of_name) for row in range(num_home) for of_name in self.home.items()):
            grad, parameter = returned.get(name, {}).get(row), parameters[row]
            main_grad = getattr(parameter, "main_grad", None)
            if grad is not None and main_grad is not None:
                # autograd would round to the parameter's dtype, and after fused kernels Megatron ignores what it brings
                main_grad.add_(grad)
                grad = None
            found.append(None if grad is None else grad.to(parameter.dtype))
        return found

    def _gradient_dtype(self, weight: Tensor) -> torch.dtype:
        # kernels that add to `main_grad` make gradients in float32, others in what they compute in
        return torch.promote_types(weight.dtype, torch.float32) if self._fuses_gradients else weight.dtype

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

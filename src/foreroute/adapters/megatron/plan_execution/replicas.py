"""The replicas of one MoE layer of Megatron, whose experts have parameters of their own.

Slots are plain tensors, which DistributedDataParallel does not see either. `BringHome` adds gradients of replicas to
`main_grad` in its dtype, float32 as a rule. DistributedDataParallel counts a gradient as ready on AccumulateGrad of its
parameter, which comes after `BringHome`: whatever bucket is reduced then has the gradients of all replicas.

Cells without replicas have the same nodes, with nothing to do. Buckets get ready in an order that follows from the
nodes, and groups of expert data parallelism, which reduce them together, have plans of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreroute.adapters.megatron.plan_execution.experts import RunReplicas
from foreroute.ep.replicas import Replicas
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.ep.transfer.replica_weights import Cell
from foreroute.plan.schedule import CellSchedule


class SeparateReplicas(Replicas):
    """Replicas beside experts that have parameters of their own.

    Args:
        cell: which.
        source: of the weights.
        home: name -> the parameter of each home expert of the layer, in ascending order of its id.
        moves: of the cell, on this rank; None where no rank has a replica.
        fuses_gradients: whether kernels add the gradient of a weight to its `main_grad` and return none.

    Attributes:
        slots: of the replicas here, ascending.
    """

    home: Mapping[str, Sequence[nn.Parameter]]

    def __init__(
        self,
        cell: Cell,
        source: TransferEngine,
        home: Mapping[str, Sequence[nn.Parameter]],
        moves: CellSchedule | None,
        *,
        fuses_gradients: bool,
    ) -> None:
        super().__init__(cell, source, home, served=moves is not None)
        self.slots: list[int] = [] if moves is None else np.sort(moves.served["slot"]).tolist()
        self._fuses_gradients = fuses_gradients
        self._fused: list[Tensor] = []

    def compute(
        self, run: RunReplicas, rows: Tensor, probs: Tensor, sizes: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Run the replicas here, each on its rows.

        Args:
            run: those of this layer.
            rows: [R, D], in order of slot.
            probs: [R].
            sizes: rows of each replica here.

        Returns:
            What comes out of the replicas, and the token for `give_up`.
        """
        token, borrowed = self.borrow()
        flat: list[Any] = borrowed  # tensors are given an attribute
        num = len(self.slots)
        if self._fuses_gradients:
            self._fused = [torch.zeros_like(weight, dtype=self._gradient_dtype(weight)) for weight in flat]
            for weight, main_grad in zip(flat, self._fused, strict=True):
                weight.main_grad = main_grad
        weights = [dict(zip(self.home, flat[i::num], strict=True)) for i in range(num)]
        computed: list[Tensor] = []
        if num:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                computed = run(weights, rows, probs, sizes)
        if self._fuses_gradients:
            for weight in flat:
                # Transformer Engine finds main_grad through the tensor, and would keep what is in the slot with it
                weight.data = weight.new_empty(0)
        return computed, token

    def parameters(self) -> list[Tensor]:
        """Expert after expert."""
        return [parameter for of_one in zip(*self.home.values(), strict=True) for parameter in of_one]

    def borrowed(self) -> list[Tensor]:
        """Name after name, and of each replica after replica."""
        # a view would keep what it is a view of, emptied or not
        return [row.data for name in self.home for row in self.weights.get(name, ())]

    def gradients(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Of all names; zeros for a replica that no row came to."""
        found, self._fused = self._fused if self._fuses_gradients else grads, []
        own = [
            torch.zeros_like(weight) if grad is None else grad
            for weight, grad in zip(self.borrowed(), found, strict=True)
        ]
        num = len(self.slots)
        return {
            name: torch.stack(own[n * num : (n + 1) * num]) if num else rows.to(self._gradient_dtype(rows))
            for n, (name, rows) in enumerate((name, self.weights[name]) for name in self.home)
        }

    def add_home(self, returned: dict[str, dict[int, Tensor]], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """To `main_grad`, where there is one; else through autograd."""
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
        """What kernels make gradients in: float32 (float64 for float64) where they add, else what they compute in."""
        return torch.promote_types(weight.dtype, torch.float32) if self._fuses_gradients else weight.dtype

    def _pack(self, tensor: Tensor) -> Any:
        """What autograd keeps: in place of a borrowed weight, or a view of it, where it lies in the slots."""
        assert self.weights, "replicas compute before they are given up"
        for name, weights in self.weights.items():
            if tensor.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr() and tensor.numel():
                return name, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert self.weights, "Refetch comes first"
        name, size, stride, offset = packed
        return self.weights[name].as_strided(size, stride, offset)

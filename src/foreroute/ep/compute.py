"""What replicas compute, on rows that are in order of their group, with weights that are fetched for the pass.

Weights lie as the parameters of experts modules in transformers 5 do. The module's attributes `has_gate`, `has_bias`
and `is_transposed` tell how, and its method `_apply_gate` knows whether gate and up are concatenated or interleaved.

V replicas here, N rows, D hidden size, E experts, G ranks of a group, W ranks that own each expert once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foreroute.ep.dispatch import RowGroups
from foreroute.ep.replicas import Replicas
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.ep.transfer.gradients import segment_sums, wide_dtype
from foreroute.replay.rows import joined_to_device


class StackedReplicas(Replicas):
    """Replicas beside an experts module whose parameters have an axis of experts in front.

    Gradients are made and returned in float32 (float64 for weights in float64), and rounded once, when they have been
    added to those of the home experts.
    """

    def __init__(
        self,
        cell: Cell,
        engine: TransferEngine,
        home: Mapping[str, Tensor],  # [E / G, ...], what home experts compute with, maybe a copy in another dtype
        owned: Mapping[str, Tensor],  # [E / W, ...], the memory that the optimizer updates, from which weights leave
        terms: Sequence[LowRankTerm] = (),  # of adapters, whose factors are among both
    ) -> None:
        super().__init__(cell, engine, owned)
        self.home, self.terms = home, terms
        trained = {name for name, shard in home.items() if shard.requires_grad}
        factors = {factor for term in terms for factor in term.factors}
        adapted = {term.parameter for term in terms if term.scaling and not trained.isdisjoint(term.factors)}
        self._in_graph = [name for name in home if name not in factors and name in trained | adapted]

    def parameters(self) -> list[Tensor]:
        return list(self.home.values())

    def graph_inputs(self) -> list[Tensor]:
        # Autograd casts a gradient to the dtype of its input, which may be bfloat16. So weights stand in the graph as
        # zeros in float32 that have a shape and no memory; products read the weights themselves.
        return [
            weight.new_zeros((), dtype=wide_dtype(weight.dtype)).expand(weight.shape)
            for weight in map(self.weights.__getitem__, self._in_graph)
        ]

    def run(self, inputs: Sequence[Tensor], module: Any, rows_ND: Tensor, groups: RowGroups) -> list[Tensor]:
        """Compute rows, which are in order of group, by the layout, gate and activation of the experts module."""
        if not groups.sizes:
            return []
        stand_ins = dict(zip(self._in_graph, inputs, strict=True))
        up = "gate_up_proj" if module.has_gate else "up_proj"
        hidden = self._linear(module, up, rows_ND, groups, stand_ins)
        activated = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        out = self._linear(module, "down_proj", activated, groups, stand_ins)
        return [module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out]

    def _linear(
        self, module: Any, name: str, rows: Tensor, groups: RowGroups, stand_ins: Mapping[str, Tensor]
    ) -> Tensor:
        bias = f"{name}_bias"
        out: Tensor = ReplicaLinear.apply(
            rows.to(self.home[name].dtype),
            stand_ins.get(name),
            stand_ins.get(bias),
            partial(self.weight, name),
            self.weight(bias) if module.has_bias else None,
            module.is_transposed,
            groups,
        )
        return out

    def weight(self, name: str) -> Tensor:
        """Give the weight that the replicas compute with, [V, ...], while they are fetched."""
        weight = self.weights[name].to(self.home[name].dtype)
        return adapt(name, {**self.weights, name: weight}, self.terms)

    def grads_to_return(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, known in zip(self._in_graph, grads, strict=True):
            weight = self.weights[name]
            grad = weight.new_zeros(weight.shape, dtype=wide_dtype(weight.dtype)) if known is None else known
            found[name] = grad
            for term in self.terms:
                if term.parameter == name and term.scaling:
                    found |= term.factor_grads(self.weights, grad, self.home[name].dtype)
        return {name: grad for name, grad in found.items() if self.home[name].requires_grad}

    def add_returned(
        self, returned: dict[str, dict[int, Tensor]], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        totals: list[Tensor | None] = []
        for (name, shard), grad in zip(self.home.items(), grads, strict=True):
            total = grad
            if name in returned:
                total = torch.zeros_like(shard) if grad is None else grad
                # in place, as no other node is given it; the sum is made in float32 and rounded once
                for row, gradient in returned[name].items():
                    total[row].add_(gradient)
            totals.append(total)
        return totals


class LowRankTerm(NamedTuple):
    """What an adapter (LoRA) adds to a parameter in one pass: s B A of every expert."""

    parameter: str  # its name; [experts, in, out] where `is_transposed`, else [experts, out, in]
    factors: tuple[str, str]  # the names of A [experts, rank, in] and of B [experts, out, rank]
    scaling: float  # s; 0 while the adapter is off
    is_transposed: bool

    def factor_grads(self, weights: Mapping[str, Tensor], grad: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Give the gradients of A and B, which were rounded to `dtype`, of that of the adapted weight [V, ...]."""
        right, left = (weights[factor].to(dtype).to(grad.dtype) for factor in self.factors)
        grad = grad.mT if self.is_transposed else grad
        with torch.autocast(grad.device.type, enabled=False):
            found = left.mT @ grad * self.scaling, grad @ right.mT * self.scaling
        return dict(zip(self.factors, found, strict=True))


def adapt(name: str, weights: Mapping[str, Tensor], terms: Sequence[LowRankTerm]) -> Tensor:
    """Give the weight that experts compute with, [V, ...], of the parameter and its factors, [V, ...] by name."""
    weight = weights[name]
    for term in terms:
        if term.parameter == name and term.scaling:
            right, left = (weights[factor].to(weight.dtype) for factor in term.factors)
            if term.is_transposed:
                left, right = right.mT, left.mT
            # as PEFT does it: what is adapted keeps its dtype
            with torch.autocast(weight.device.type, enabled=False):
                weight = torch.baddbmm(weight, left, right, alpha=term.scaling)
    return weight


class ReplicaLinear(torch.autograd.Function):
    """Rows times the matrix of their group, plus its bias; `stand_in`s take gradients, None where none is wanted.

    Autograd keeps the rows and no weight: slots serve other cells until backward, where `get_weight` is called anew.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        stand_in: Tensor | None,
        bias_stand_in: Tensor | None,
        get_weight: Callable[[], Tensor],
        bias: Tensor | None,
        is_transposed: bool,
        groups: RowGroups,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.get_weight, ctx.is_transposed, ctx.groups = get_weight, is_transposed, groups
        weight = get_weight()
        out = _grouped_mm(rows, weight if is_transposed else weight.mT, groups)
        if bias is None:
            return out
        sizes = joined_to_device([np.asarray(groups.sizes, np.int64)], bias.device)
        # with the size of the output, repeat_interleave does not ask the device for it
        return out + bias.repeat_interleave(sizes, dim=0, output_size=len(rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (grad,), groups = ctx.saved_tensors, grads, ctx.groups
        weight, weight_grad, bias_grad = ctx.get_weight(), None, None
        if ctx.needs_input_grad[1]:
            left, right = (rows, grad) if ctx.is_transposed else (grad, rows)
            weight_grad = _sum_outer_products(left, right, groups)
        if ctx.needs_input_grad[2]:
            bias_grad = segment_sums(grad, groups.sizes)
        row_grad = _grouped_mm(grad, weight.mT if ctx.is_transposed else weight, groups)
        return row_grad, weight_grad, bias_grad, None, None, None, None


def _grouped_mm(rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    if rows.dtype == torch.float64:  # which grouped_mm lacks
        parts = zip(rows.split(groups.sizes), weight.unbind(0), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])
    return functional.grouped_mm(rows, weight, offs=groups.ends)


def _sum_outer_products(left: Tensor, right: Tensor, groups: RowGroups) -> Tensor:
    """Add up outer products over the rows of every group, [V, columns of left, columns of right], in float32."""
    wide = wide_dtype(left.dtype)
    sums = left.new_empty((len(groups.sizes), left.shape[1], right.shape[1]), dtype=wide)
    # grouped_mm would round to the dtype of the rows. Replicas are few, and the host knows how many rows each has.
    for total, a, b in zip(sums, left.split(groups.sizes), right.split(groups.sizes), strict=True):
        if left.is_cuda and left.dtype != wide:  # tensor cores; other devices lack out_dtype
            torch.mm(a.t(), b, out_dtype=wide, out=total)
        else:  # autocast leaves alone what is given its output
            torch.mm(a.t().to(wide), b.to(wide), out=total)
    return sums

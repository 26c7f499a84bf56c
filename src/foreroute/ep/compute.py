"""Computation of replicas, on rows that are in order of their group, with weights that are fetched for the pass.

Weights lie as the parameters of experts modules in transformers 5 do. The module's attributes `has_gate`, `has_bias`
and `is_transposed` tell how, and its method `_apply_gate` knows whether gate and up are concatenated or interleaved.

V replicas here, N rows, D hidden size, E experts, G ranks of a group, W ranks that own each expert once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foreroute.ep.dispatch import RowGroups
from foreroute.ep.replicas import Replicas
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.ep.transfer.gradients import wide_dtype
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
        terms: Sequence[LowRankTerm] = (),  # of adapters, whose factors are among them
    ) -> None:
        super().__init__(cell, engine)
        self.home, self.terms = home, terms
        trained = {name for name, shard in home.items() if shard.requires_grad}
        factors = {factor for term in terms for factor in term.factors}
        adapted = {term.parameter for term in terms if term.scaling and not trained.isdisjoint(term.factors)}
        self._trained = [name for name in home if name not in factors and name in trained | adapted]
        self._grads: dict[str, Tensor] = {}  # of those, as `ReplicaLinear` has made them

    def parameters(self) -> list[Tensor]:
        return list(self.home.values())

    def run(
        self, token: Tensor, inputs: Sequence[Tensor], module: Any, rows_ND: Tensor, groups: RowGroups
    ) -> list[Tensor]:
        """Compute rows, which are in order of group, by the layout, gate and activation of the experts module."""
        if not groups.sizes:
            return []
        up = "gate_up_proj" if module.has_gate else "up_proj"
        hidden = ReplicaLinear.apply(token, rows_ND.to(self.home[up].dtype), self, up, module, groups)
        activated = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        activated = activated.to(self.home["down_proj"].dtype)
        out = ReplicaLinear.apply(token, activated, self, "down_proj", module, groups)
        return [module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out]

    def weight(self, name: str) -> Tensor:
        """Give the weight that the replicas compute with, [V, ...], while they are fetched."""
        weight = self.weights[name].to(self.home[name].dtype)
        return adapt(name, {**self.weights, name: weight}, self.terms)

    def keep_grads(self, name: str, rows: Tensor, grad: Tensor, module: Any, groups: RowGroups) -> None:
        """Make the gradients of a weight and of its bias, of rows and of the gradient of what came of them."""
        # not by the graph, where autograd would round them to the dtype of the weight
        if name in self._trained:
            left, right = (rows, grad) if module.is_transposed else (grad, rows)
            self._grads[name] = _sum_outer_products(left, right, groups)
        if f"{name}_bias" in self._trained:
            self._grads[f"{name}_bias"] = _sum_rows(grad, groups)

    def grads_to_return(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        found, self._grads = self._grads, {}
        for name in self._trained:
            weight = self.weights[name]
            if name not in found:  # no replica is here, or no row came
                found[name] = weight.new_zeros(weight.shape, dtype=wide_dtype(weight.dtype))
            grad = found[name]
            for term in self.terms:
                if term.parameter == name and term.scaling:
                    found |= term.factor_grads(self.weights, grad, self.home[name].dtype)
        return {name: grad for name, grad in found.items() if self.home[name].requires_grad}

    def add_returned(
        self, returned: dict[str, dict[int, Tensor]], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        totals: list[Tensor | None] = []
        rows: list[Tensor] = []
        for (name, shard), grad in zip(self.home.items(), grads, strict=True):
            total = torch.zeros_like(shard) if grad is None and name in returned else grad
            if total is not None and returned.get(name):
                rows += map(total.unbind().__getitem__, returned[name])
            totals.append(total)
        if rows:
            # in place, as no other node is given them; each sum is made in float32 and rounded once
            torch._foreach_add_(rows, [each for name in self.home for each in returned.get(name, {}).values()])
        return totals


class LowRankTerm(NamedTuple):
    """Term that an adapter (LoRA) adds to a parameter in one pass: s B A of every expert."""

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
    """Rows times the matrix of their group, plus its bias, whose gradients the replicas keep until they are returned.

    Autograd keeps the rows and no weight: slots serve other cells until backward, which asks for the weight anew. The
    token is that of `ReturnGrads`, which runs behind the backward of this.
    """

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, rows: Tensor, replicas: StackedReplicas, name: str, module: Any, groups: RowGroups
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.replicas, ctx.name, ctx.module, ctx.groups = replicas, name, module, groups
        weight = replicas.weight(name)
        out = _grouped_mm(rows, weight if module.is_transposed else weight.mT, groups)
        if not module.has_bias:
            return out
        # with the size of the output, repeat_interleave does not ask the device for it
        sizes = _sizes_there(groups, out.device)
        return out + replicas.weight(f"{name}_bias").repeat_interleave(sizes, dim=0, output_size=len(rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (grad,), replicas, module = ctx.saved_tensors, grads, ctx.replicas, ctx.module
        replicas.keep_grads(ctx.name, rows, grad, module, ctx.groups)
        weight = replicas.weight(ctx.name)
        row_grad = _grouped_mm(grad, weight.mT if module.is_transposed else weight, ctx.groups)
        return None, row_grad, None, None, None, None


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


def _sum_rows(rows: Tensor, groups: RowGroups) -> Tensor:
    """Add up the rows of every group, one after the other, [V, columns], in float32, on any device alike."""
    wide, lengths = rows.to(wide_dtype(rows.dtype)), _sizes_there(groups, rows.device)
    # on a device, checking the lengths would wait for it
    unchecked = rows.device.type != "cpu"
    return torch.segment_reduce(wide, "sum", lengths=lengths, axis=0, unsafe=unchecked, initial=0.0)


def _sizes_there(groups: RowGroups, device: torch.device) -> Tensor:
    return joined_to_device([np.asarray(groups.sizes, np.int64)], device)

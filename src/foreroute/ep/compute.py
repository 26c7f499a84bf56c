"""What replicas compute, on rows that are already in order of their group, with weights that are borrowed for the pass.

Gradients of these weights are sent home. The layouts are those of experts modules in transformers 5, told by their
attributes: `has_gate`, `has_bias`, `is_transposed` and the method `_apply_gate`, which also knows whether gate and up
are concatenated or interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foreroute.ep.dispatch import RowGroups
from foreroute.ep.replicas import Replicas
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.ep.transfer.replica_weights import Cell, Home, segment_sums


class StackedReplicas(Replicas):
    """Replicas beside an experts module whose parameters have an axis of experts in front.

    Weights leave from the memory that the optimizer updates, and gradients arrive at what the pass computes with: a
    framework may compute with a copy, in another dtype.

    Args:
        cell, source: as in `Replicas`.
        home: name -> [E / G, ...], what home experts compute with in this pass.
        owned: name -> [E / W, ...], what the optimizer updates, given to the engine.
        terms: what adapters add, whose factors are among both.

    Attributes:
        terms: the same.
    """

    home: Mapping[str, Tensor]

    def __init__(
        self, cell: Cell, source: TransferEngine, home: Home, owned: Home, terms: Sequence[LowRankTerm] = ()
    ) -> None:
        super().__init__(cell, source, home)
        self.terms = terms
        self._owned = owned

    def fetch(self) -> None:
        """See `Replicas`."""
        self._fetch = self._source.fetch(self.cell, self._owned)

    def compute(self, module: Any, rows_RD: Tensor, groups: RowGroups) -> Tensor:
        """What the replicas here make of their rows, [R, D]. All ranks call it, those without a replica too.

        Autograd keeps no weight: backward asks for those once more, since their slots may have served other cells.
        """
        token, borrowed = self.borrow()
        out = rows_RD
        if groups.sizes_S:
            weights = dict(zip(self.home, borrowed, strict=True))
            # autograd keeps factors, which are small: not in slots
            weights |= {name: weights[name].clone() for term in self.terms for name in term.factors}
            weights |= {term.parameter: adapted(term.parameter, weights, self.terms) for term in self.terms}
            out = run_replicas(module, weights, rows_RD, groups, self.again)
        return self.give_up(token, out)

    def again(self, name: str) -> Tensor:
        """A borrowed weight, in backward."""
        weight = self.weights[name].to(self.home[name].dtype)
        return adapted(name, {**self.weights, name: weight}, self.terms)

    def parameters(self) -> list[Tensor]:
        """Name after name."""
        return list(self.home.values())

    def passed_on(self) -> list[Tensor]:
        """Views of `parameters`."""
        return [shard.view_as(shard) for shard in self.home.values()]

    def borrowed(self) -> list[Tensor]:
        """Name after name, [replicas here, ...] each."""
        return [self.weights[name].detach().to(shard.dtype) for name, shard in self.home.items()]

    def untrained(self, borrowed: list[Tensor]) -> list[Tensor]:
        """Those whose shard is not trained."""
        shards = self.home.values()
        return [weight for weight, shard in zip(borrowed, shards, strict=True) if not shard.requires_grad]

    def gradients(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Gradients of the trained weights; zeros where no row has brought one."""
        return {
            name: torch.zeros_like(self.weights[name]) if grad is None else grad.to(self.weights[name].dtype)
            for (name, shard), grad in zip(self.home.items(), grads, strict=True)
            if shard.requires_grad
        }

    def add_home(self, returned: dict[str, dict[int, Tensor]], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """To what home experts have found, in place: no other node is given that."""
        totals: list[Tensor | None] = []
        for (name, shard), grad in zip(self.home.items(), grads, strict=True):
            total = grad
            if name in returned:
                total = torch.zeros_like(shard) if grad is None else grad
                for row, gradient in returned[name].items():
                    total[row].add_(gradient)
            totals.append(total)
        return totals


class LowRankTerm(NamedTuple):
    """What an adapter (LoRA) adds to a parameter in one pass: s B A of every expert.

    Attributes:
        parameter: its name; [experts, in, out] where `is_transposed`, else [experts, out, in].
        factors: the names of A [experts, rank, in] and of B [experts, out, rank].
        scaling: s; 0 while the adapter is off.
        is_transposed: how the parameter is laid out.
    """

    parameter: str
    factors: tuple[str, str]
    scaling: float
    is_transposed: bool


def adapted(name: str, weights: Mapping[str, Tensor], terms: Sequence[LowRankTerm]) -> Tensor:
    """The weight that experts compute with, [S, ...].

    Args:
        name: of the parameter.
        weights: name -> [S, ...], those of factors too.
        terms: of all parameters.
    """
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


def run_replicas(
    module: Any,
    weights: Mapping[str, Tensor],
    rows_RD: Tensor,
    groups: RowGroups,
    again: Callable[[str], Tensor],
) -> Tensor:
    """Up, gate and down projection of every group with its own weights.

    Args:
        module: the experts module, for its layout, gate and activation.
        weights: name -> [S, ...], as the module's own parameters are laid out, a row per group; not kept for backward.
        rows_RD: [R, D], in order of group.
        groups: of the rows.
        again: gives a weight in backward.

    Returns:
        [R, D'].
    """
    up = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = _grouped_linear(module, weights, up, rows_RD, groups, again)
    activated = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    out = _grouped_linear(module, weights, "down_proj", activated, groups, again)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def _grouped_linear(
    module: Any,
    weights: Mapping[str, Tensor],
    name: str,
    rows: Tensor,
    groups: RowGroups,
    again: Callable[[str], Tensor],
) -> Tensor:
    weight = weights[name]
    out: Tensor = BorrowedProduct.apply(
        rows.to(weight.dtype), weight, partial(again, name), module.is_transposed, groups
    )
    if not module.has_bias:
        return out
    biased: Tensor = AddBias.apply(out, weights[f"{name}_bias"], groups)
    return biased


class AddBias(torch.autograd.Function):
    """`AddBias.apply(rows_RD, bias_SD, groups)`: rows plus the bias of their group. Keeps neither."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, groups: RowGroups) -> Tensor:
        ctx.groups, ctx.dtype = groups, bias.dtype
        sizes = torch.tensor(groups.sizes_S).to(bias.device, non_blocking=True)
        return rows + bias.repeat_interleave(sizes, dim=0, output_size=sum(groups.sizes_S))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        bias_grad = segment_sums(grads[0], ctx.groups.sizes_S).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return grads[0], bias_grad, None


class BorrowedProduct(torch.autograd.Function):
    """`BorrowedProduct.apply(rows_RD, weight, again, is_transposed, groups)`: rows times their group's matrix.

    The matrices are [S, ...] as the parameter is laid out. Keeps the rows; in backward, `again` gives the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        again: Callable[[], Tensor],
        is_transposed: bool,
        groups: RowGroups,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.again, ctx.is_transposed, ctx.groups = again, is_transposed, groups
        return _grouped_mm(rows, weight if is_transposed else weight.transpose(-2, -1), groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        grad, weight, weight_grad = grads[0], ctx.again(), None
        if ctx.needs_input_grad[1]:
            left, right = (rows, grad) if ctx.is_transposed else (grad, rows)
            weight_grad = _grouped_outer(left, right, ctx.groups)
        row_grad = _grouped_mm(grad, weight.transpose(-2, -1) if ctx.is_transposed else weight, ctx.groups)
        return row_grad, weight_grad, None, None, None


def _grouped_mm(rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    if rows.dtype == torch.float64:  # which grouped_mm lacks
        parts = zip(rows.split(groups.sizes_S), weight.unbind(0), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])
    return functional.grouped_mm(rows, weight, offs=groups.ends_S)


def _grouped_outer(left: Tensor, right: Tensor, groups: RowGroups) -> Tensor:
    """Sums over the rows of every group, [S, columns of left, columns of right]."""
    if left.dtype == torch.float64:
        sizes = groups.sizes_S
        return torch.stack([a.t() @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)])
    return functional.grouped_mm(left.transpose(0, 1), right, offs=groups.ends_S)

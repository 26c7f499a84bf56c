"""What this rank computes, on rows that are already in order of their group: its home experts, and its replicas.

Home experts compute with the rank's own parameters. A replica computes with weights that are only borrowed for the
pass, and its gradients are sent home. The layouts are those of experts modules in transformers 5, told by their
attributes: `has_gate`, `has_bias`, `is_transposed` and the method `_apply_gate`, which also knows whether gate and up
are concatenated or interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foreroute.ep.adapters import LowRankTerm, adapted, with_adapters
from foreroute.ep.dispatch import RowGroups
from foreroute.ep.replicas import Replicas
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.ep.transfer.replica_weights import Cell, Home, segment_sums
from foreroute.errors import AttachError

LEAST_TORCH = "2.10"
"""The first with torch.nn.functional.grouped_mm; what pyproject.toml asks for."""

ROW_MULTIPLE = {("cpu", torch.float32): 16}
"""A GEMM on a CPU computes rows in tiles. Leftover rows, and all rows of a small GEMM, get another order of sums: MKL
without AVX has tiles of 4 rows and is small at 4; MKL with AVX2 or AVX-512 is small below 4, and on one CPU below 16
for rows of 384 numbers. Multiples of 16 rows leave none over and are not small. `tests/ep/test_bits.py` tries it, and
docs/experts.md says where a library cuts sums by the number of rows, so that no multiple helps."""

WHOLE_VECTORS = 64
"""This many rows of any width fill whole SIMD registers. The CPU computes what is left one by one, with another exp."""


def run_experts(
    module: Any,
    weights: Mapping[str, Tensor],
    rows_RD: Tensor,
    gates_R1: Tensor,
    groups: RowGroups,
    replicas: StackedReplicas | None = None,
) -> Tensor:
    """Up, gate and down projection of every group with its own weights, times the gate weight of each row.

    Gate weights are applied between activation and down projection, whose input is narrower than its result. Autograd
    keeps the rows [R, D], for the gradient of the up projection, what that gave, [R, 2 I] with a gate and [R, I]
    without, and the weighted activations [R, I].

    Args:
        module: the experts module, for its layout, gate and activation.
        weights: name -> [S, ...], as the module's own parameters are laid out, one row per group.
        rows_RD: [R, D], in order of group.
        gates_R1: [R, 1], their gate weights.
        groups: of the rows.
        replicas: whose weights they are, which are not kept for backward; None for those of home experts.

    Returns:
        [R, D'].
    """
    up = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = _grouped_linear(module, weights, up, rows_RD, None, groups, replicas)
    weighted = Activate.apply(hidden, gates_R1, module._apply_gate if module.has_gate else module.act_fn)
    return _grouped_linear(module, weights, "down_proj", weighted, gates_R1, groups, replicas)


def require_grouped_mm() -> None:
    """Raise `AttachError` for a torch that cannot multiply the rows of every expert by its own matrix."""
    if not hasattr(functional, "grouped_mm"):
        raise AttachError(
            f"torch {torch.__version__} has no torch.nn.functional.grouped_mm, which experts on several ranks are "
            f"computed with; install torch {LEAST_TORCH} or newer"
        )


def row_multiple(weights: Mapping[str, Tensor]) -> int:
    """Give the number that group sizes must be multiples of, so that a row's bits do not depend on the group's size."""
    weight = weights["down_proj"]
    return ROW_MULTIPLE.get((weight.device.type, weight.dtype), 1)


class Activate(torch.autograd.Function):
    """`Activate.apply(hidden_RI, gates_R1, function)`: a function of each row times its gate weight.

    Keeps what it is given, and computes the function again in backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gates: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(hidden, gates)
        ctx.function = function
        return _activated(hidden, gates, function)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            hidden, gates = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
            out = _activated(hidden, gates, ctx.function)
        return *torch.autograd.grad(out, [hidden, gates], grads[0]), None


def _activated(hidden: Tensor, gates: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """So that on a CPU the bits of a row do not depend on which others there are."""
    if hidden.device.type != "cpu":
        activated = function(hidden)
    else:
        activated = function(functional.pad(hidden, (0, 0, 0, -len(hidden) % WHOLE_VECTORS)))[: len(hidden)]
    return (activated * gates).to(hidden.dtype)


def _grouped_linear(
    module: Any,
    weights: Mapping[str, Tensor],
    name: str,
    rows: Tensor,
    gates_R1: Tensor | None,
    groups: RowGroups,
    replicas: StackedReplicas | None,
) -> Tensor:
    """Apply one projection to rows that are weighted already; gate weights, where given, weight the bias alone."""
    bias, weight = f"{name}_bias", weights[name]
    rows = rows.to(weight.dtype)
    if replicas is None:
        out = _grouped_mm(rows, weight if module.is_transposed else weight.transpose(-2, -1), groups)
    else:
        out = BorrowedProduct.apply(rows, weight, partial(replicas.again, name), module.is_transposed, groups)
    if not module.has_bias:
        return out
    bias_again = None if replicas is None else partial(replicas.again, bias)
    biased: Tensor = AddBias.apply(out, weights[bias], gates_R1, groups, bias_again)
    return biased


class AddBias(torch.autograd.Function):
    """`AddBias.apply(rows_RD, bias_SD, gates_R1, groups, again)`: rows plus the bias of their group.

    The bias is weighted where there are gate weights. Keeps no row, and no bias where `again` gives it in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        bias: Tensor,
        gates: Tensor | None,
        groups: RowGroups,
        again: Callable[[], Tensor] | None,
    ) -> Tensor:
        ctx.save_for_backward(bias if again is None else None, gates)
        ctx.groups, ctx.again = groups, again
        added = _of_group(bias, groups)
        return (rows + (added if gates is None else added * gates)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        bias, gates = ctx.saved_tensors
        bias = bias if ctx.again is None else ctx.again()
        grad, groups = grads[0], ctx.groups
        bias_grad = gate_grad = None
        if ctx.needs_input_grad[1]:
            bias_grad = segment_sums(grad if gates is None else grad * gates, groups.sizes_S).to(bias.dtype)
        if ctx.needs_input_grad[2]:
            gate_grad = (grad * _of_group(bias, groups)).sum(dim=1, keepdim=True).to(gates.dtype)
        return grad, bias_grad, gate_grad, None, None


def _of_group(bias: Tensor, groups: RowGroups) -> Tensor:
    """[S, D] to [R, D], that of every row's group."""
    sizes = torch.tensor(groups.sizes_S).to(bias.device, non_blocking=True)
    return bias.repeat_interleave(sizes, dim=0, output_size=sum(groups.sizes_S))


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


class StackedReplicas(Replicas):
    """Replicas beside an experts module whose parameters have an axis of experts in front.

    `home` is name -> [E / G, ...]; home experts compute with what `announce` gives, to whose gradients those of
    replicas are added in place. `terms` are what adapters add to parameters; their factors are in `home`.
    """

    home: Mapping[str, Tensor]

    def __init__(self, cell: Cell, source: TransferEngine, home: Home, terms: Sequence[LowRankTerm] = ()) -> None:
        super().__init__(cell, source, home)
        self._terms = terms

    def compute(self, module: Any, rows_RD: Tensor, gates_R1: Tensor, groups: RowGroups) -> Tensor:
        """`run_experts` by the replicas here; [R, D]. All ranks call it, those without a replica too.

        Autograd keeps what it keeps of home experts, and no weight: backward asks for those once more, since their
        slots may have served other cells.
        """
        token, borrowed = self.borrow()
        if groups.sizes_S:
            weights = dict(zip(self.home, borrowed, strict=True))
            if self._terms:
                # autograd keeps factors, which are small: not in slots
                weights |= {name: weights[name].clone() for term in self._terms for name in term[1:3]}
                weights = with_adapters(weights, self._terms)
            out = run_experts(module, weights, rows_RD, gates_R1, groups, self)
        else:
            out = rows_RD.to(next(iter(self.home.values())).dtype)
        return self.give_up(token, out)

    def again(self, name: str) -> Tensor:
        """A borrowed weight, in backward."""
        return adapted(name, self.weights, self._terms)

    def parameters(self) -> list[Tensor]:
        """Name after name."""
        return list(self.home.values())

    def passed_on(self) -> list[Tensor]:
        """Views of `parameters`."""
        return [shard.view_as(shard) for shard in self.home.values()]

    def borrowed(self) -> list[Tensor]:
        """Name after name, [replicas here, ...] each."""
        return [self.weights[name].detach() for name in self.home]

    def untrained(self, borrowed: list[Tensor]) -> list[Tensor]:
        """Those whose shard is not trained."""
        shards = self.home.values()
        return [weight for weight, shard in zip(borrowed, shards, strict=True) if not shard.requires_grad]

    def gradients(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Gradients of what is trained; zeros where no row has brought one."""
        return {
            name: torch.zeros_like(self.weights[name]) if grad is None else grad
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

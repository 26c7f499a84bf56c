"""What this rank computes, on rows that are already in order of their group: its home experts, and its replicas.

Home experts compute with the rank's own parameters. A replica computes with weights that are only borrowed for the
pass, and its gradients are sent home. The layouts are those of experts modules in transformers 5, told by their
attributes: `has_gate`, `has_bias`, `is_transposed` and the method `_apply_gate`, which also knows whether gate and up
are concatenated or interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreroute.ep.transfer import Cell, PendingGradients, ReplicaWeights
from foreroute.ep.transfer.replica_weights import segment_sums
from foreroute.errors import AttachError
from foreroute.plan import CellPlan

LEAST_TORCH = "2.10"
"""The first with torch.nn.functional.grouped_mm; what pyproject.toml asks for."""

ROW_MULTIPLE = {("cpu", torch.float32): 16}
"""A GEMM on a CPU computes rows in tiles. Leftover rows, and all rows of a small GEMM, get another order of sums: MKL
without AVX has tiles of 4 rows and is small at 4; MKL with AVX2 or AVX-512 is small below 4, and on one CPU below 16
for rows of 384 numbers. Multiples of 16 rows leave none over and are not small. `tests/ep/test_bits.py` tries it, and
docs/experts.md says where a library cuts sums by the number of rows, so that no multiple helps."""

WHOLE_VECTORS = 64
"""So many rows of any width fill whole SIMD registers. The CPU computes what is left one by one, with another exp."""


def run_experts(
    module: Any,
    weights: Mapping[str, Tensor] | BorrowedWeights,
    rows_RD: Tensor,
    gates_R1: Tensor,
    group_rows_S: Sequence[int],
) -> Tensor:
    """Up, gate and down projection of every group with its own weights, times the gate weight of each row.

    Gate weights are applied between activation and down projection, whose input is narrower than its result. Autograd
    keeps the rows [R, D], for the gradient of the up projection, what that gave, [R, 2 I] with a gate and [R, I]
    without, and the weighted activations [R, I].

    Args:
        module: the experts module, for its layout, gate and activation.
        weights: name -> [S, ...], as the module's own parameters are laid out, one row per group; or those borrowed.
        rows_RD: [R, D], in order of group.
        gates_R1: [R, 1], their gate weights.
        group_rows_S: rows of each group.

    Returns:
        [R, D'].
    """
    up = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = _grouped_linear(module, weights, up, rows_RD, None, group_rows_S)
    weighted = Activate.apply(hidden, gates_R1, module._apply_gate if module.has_gate else module.act_fn)
    return _grouped_linear(module, weights, "down_proj", weighted, gates_R1, group_rows_S)


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
    weights: Mapping[str, Tensor] | BorrowedWeights,
    name: str,
    rows: Tensor,
    gates_R1: Tensor | None,
    group_rows_S: Sequence[int],
) -> Tensor:
    """Apply one projection to rows that are weighted already; gate weights, where given, weight the bias alone."""
    bias = f"{name}_bias"
    if isinstance(weights, BorrowedWeights):
        rows = rows.to(weights.tensors[name].dtype)
        out: Tensor = BorrowedProduct.apply(rows, weights, name, module.is_transposed, group_rows_S)
        return AddBorrowedBias.apply(out, gates_R1, weights, bias, group_rows_S) if module.has_bias else out
    weight = weights[name] if module.is_transposed else weights[name].transpose(-2, -1)
    out = _grouped_mm(rows.to(weight.dtype), weight, group_rows_S)
    return AddBias.apply(out, weights[bias], gates_R1, group_rows_S) if module.has_bias else out


class AddBias(torch.autograd.Function):
    """`AddBias.apply(rows_RD, bias_SD, gates_R1, group_rows_S)`: rows plus the bias of their group; keeps no row.

    The bias is weighted where there are gate weights.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, gates: Tensor | None, group_rows_S: Sequence[int]) -> Tensor:
        ctx.save_for_backward(bias, gates)
        ctx.group_rows_S = group_rows_S
        return _biased(rows, bias, gates, group_rows_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        bias, gates = ctx.saved_tensors
        grad, sizes = grads[0], ctx.group_rows_S
        bias_grad = _bias_grad(grad, bias, gates, sizes) if ctx.needs_input_grad[1] else None
        gate_grad = _bias_gate_grad(grad, bias, gates, sizes) if ctx.needs_input_grad[2] else None
        return grad, bias_grad, gate_grad, None


def _biased(rows: Tensor, bias: Tensor, gates: Tensor | None, group_rows_S: Sequence[int]) -> Tensor:
    added = _of_group(bias, group_rows_S)
    return (rows + (added if gates is None else added * gates)).to(rows.dtype)


def _bias_grad(grad: Tensor, bias: Tensor, gates: Tensor | None, group_rows_S: Sequence[int]) -> Tensor:
    return segment_sums(grad if gates is None else grad * gates, group_rows_S).to(bias.dtype)


def _bias_gate_grad(grad: Tensor, bias: Tensor, gates: Tensor, group_rows_S: Sequence[int]) -> Tensor:
    return (grad * _of_group(bias, group_rows_S)).sum(dim=1, keepdim=True).to(gates.dtype)


def _of_group(bias: Tensor, group_rows_S: Sequence[int]) -> Tensor:
    """[S, D] to [R, D], that of every row's group."""
    sizes = torch.tensor(group_rows_S).to(bias.device, non_blocking=True)
    return bias.repeat_interleave(sizes, dim=0, output_size=sum(group_rows_S))


def _grouped_mm(rows: Tensor, weight: Tensor, group_rows_S: Sequence[int]) -> Tensor:
    if rows.dtype == torch.float64:  # which grouped_mm lacks
        parts = zip(rows.split(list(group_rows_S)), weight.unbind(0), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])
    return functional.grouped_mm(rows, weight, offs=_ends(rows, group_rows_S))


def _grouped_outer(left: Tensor, right: Tensor, group_rows_S: Sequence[int]) -> Tensor:
    """Sums over the rows of every group, [S, columns of left, columns of right]."""
    if left.dtype == torch.float64:
        sizes = list(group_rows_S)
        return torch.stack([a.t() @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)])
    return functional.grouped_mm(left.transpose(0, 1), right, offs=_ends(left, group_rows_S))


def _ends(rows: Tensor, group_rows_S: Sequence[int]) -> Tensor:
    return torch.tensor(group_rows_S).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)


@dataclass(eq=False)
class BorrowedWeights:
    """The weights of the replicas here in one pass over a cell, and the gradients that its backward finds for them.

    Attributes:
        cell: which cell runs.
        source: of the weights.
        names: of the weights.
        trained: names of those that are trained.
        tensors: name -> [replicas here, ...], while they are needed: from `fetch` until the source is asked for another
            cell. Backward has them fetched again.
        grads: name -> [replicas here, ...].
        pending: gradients that backward has sent home and not waited for yet.
    """

    cell: Cell
    source: ReplicaWeights
    names: tuple[str, ...]
    trained: tuple[str, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    pending: PendingGradients | None = None

    def fetch(self, home: Sequence[Tensor]) -> None:
        """Have the weights fetched, and those of later cells begun, when the rows of the cell have left."""
        self.tensors = self.source.fetch(self.cell, dict(zip(self.names, home, strict=True)))
        self.source.prefetch()

    def send_home(self) -> None:
        """Begin to return the gradients: zeros where no row has brought one."""
        found = {name: self.grads.pop(name, None) for name in self.trained}
        grads = {name: torch.zeros_like(self.tensors[name]) if grad is None else grad for name, grad in found.items()}
        self.tensors = {}
        if grads:
            self.pending = self.source.send_home(self.cell, grads)


@dataclass(frozen=True, eq=False)
class Replicas:
    """The replicas of a cell, for one pass.

    Attributes:
        borrowed: their weights.
        plan: of the cell.
        home: name -> [E / G, ...], this rank's shard, from `ReceiveGradients`.
    """

    borrowed: BorrowedWeights
    plan: CellPlan
    home: Mapping[str, Tensor]

    @classmethod
    def announced(
        cls, cell: Cell, plan: CellPlan, source: ReplicaWeights, home: Mapping[str, nn.Parameter]
    ) -> Replicas:
        """All ranks call it before they dispatch the rows of the cell: from now on backward brings gradients home."""
        trained = tuple(name for name, shard in home.items() if shard.requires_grad)
        borrowed = BorrowedWeights(cell, source, tuple(home), trained)
        brought = ReceiveGradients.apply(borrowed, *home.values())
        return cls(borrowed, plan, dict(zip(home, brought, strict=True)))

    def fetch(self) -> None:
        """All ranks call it when these rows have left: on one communicator, what is launched first travels first."""
        self.borrowed.fetch([shard.detach() for shard in self.home.values()])

    def compute(self, module: Any, rows_RD: Tensor, gates_R1: Tensor, group_rows_S: Sequence[int]) -> Tensor:
        """`run_experts` by the replicas here; [R, D]. All ranks call it, those without a replica too.

        Autograd keeps what it keeps of home experts, and no weight: backward asks for those once more, since their
        slots may have served other cells.
        """
        rows, gates = SendGradients.apply(self.borrowed, rows_RD, gates_R1, *self.home.values())
        if group_rows_S:
            out = run_experts(module, self.borrowed, rows, gates, group_rows_S)
        else:
            out = rows.to(next(iter(self.home.values())).dtype)
        self.borrowed.tensors = {}
        again: Tensor = FetchAgain.apply(self.borrowed, out, *self.home.values())
        return again


class ReceiveGradients(torch.autograd.Function):
    """`ReceiveGradients.apply(borrowed, *home)`: the home shards as they are, with the gradients that come to them.

    `SendGradients` sends them, and they are waited for here. Autograd takes nodes that were made later first. This one
    is made before the rows are dispatched, so that while gradients travel, backward computes the home experts and sends
    the gradients of rows back. The order is the same on all ranks, since they make the same nodes.
    """

    @staticmethod
    def forward(ctx: Any, borrowed: BorrowedWeights, *home: Tensor) -> tuple[Tensor, ...]:
        ctx.borrowed = borrowed
        ctx.set_materialize_grads(False)
        views = tuple(shard.view_as(shard) for shard in home)
        ctx.mark_non_differentiable(
            *(view for view, needs in zip(views, ctx.needs_input_grad[1:], strict=True) if not needs)
        )
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        borrowed: BorrowedWeights = ctx.borrowed
        assert borrowed.pending is not None, "SendGradients comes first, which alone is given these shards"
        returned, borrowed.pending = borrowed.pending.wait(), None
        return None, *(returned.get(name) for name in borrowed.names)


class SendGradients(torch.autograd.Function):
    """`SendGradients.apply(borrowed, rows_RD, gates_R1, *home)`: rows and gate weights as they are.

    Backward comes here when the replicas have all of their gradients, and sends those home.
    """

    @staticmethod
    def forward(
        ctx: Any, borrowed: BorrowedWeights, rows: Tensor, gates: Tensor, *home: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.borrowed = borrowed
        return rows.view_as(rows), gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        borrowed: BorrowedWeights = ctx.borrowed
        borrowed.send_home()
        return None, grads[0], grads[1], *(None for _ in borrowed.names)


class FetchAgain(torch.autograd.Function):
    """`FetchAgain.apply(borrowed, out, *home)`: the result as it is. Backward begins by having the weights fetched.

    Under a non-reentrant checkpoint, whoever first asks for what was kept has the forward pass repeated, in which all
    ranks fetch. Therefore all ask here, also those that keep nothing else since they have no replica.
    """

    @staticmethod
    def forward(ctx: Any, borrowed: BorrowedWeights, out: Tensor, *home: Tensor) -> Tensor:
        ctx.borrowed = borrowed
        ctx.save_for_backward(*home)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.borrowed.fetch([shard.detach() for shard in ctx.saved_tensors])
        return None, grads[0], *(None for _ in ctx.borrowed.names)


class BorrowedProduct(torch.autograd.Function):
    """`BorrowedProduct.apply(rows_RD, borrowed, name, is_transposed, group_rows_S)`: rows times their group's matrix.

    Keeps the rows. The gradient of the matrices, [S, ...] as the parameter is laid out, is left with `borrowed`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        borrowed: BorrowedWeights,
        name: str,
        is_transposed: bool,
        group_rows_S: Sequence[int],
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.borrowed, ctx.name, ctx.is_transposed, ctx.group_rows_S = borrowed, name, is_transposed, group_rows_S
        weight = borrowed.tensors[name]
        return _grouped_mm(rows, weight if is_transposed else weight.transpose(-2, -1), group_rows_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        grad, weight = grads[0], ctx.borrowed.tensors[ctx.name]
        if ctx.name in ctx.borrowed.trained:
            left, right = (rows, grad) if ctx.is_transposed else (grad, rows)
            ctx.borrowed.grads[ctx.name] = _grouped_outer(left, right, ctx.group_rows_S)
        row_grad = _grouped_mm(grad, weight.transpose(-2, -1) if ctx.is_transposed else weight, ctx.group_rows_S)
        return row_grad, None, None, None, None


class AddBorrowedBias(torch.autograd.Function):
    """`AddBorrowedBias.apply(rows_RD, gates_R1, borrowed, name, group_rows_S)`: as `AddBias`, of borrowed biases."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        gates: Tensor | None,
        borrowed: BorrowedWeights,
        name: str,
        group_rows_S: Sequence[int],
    ) -> Tensor:
        ctx.save_for_backward(gates)
        ctx.borrowed, ctx.name, ctx.group_rows_S = borrowed, name, group_rows_S
        return _biased(rows, borrowed.tensors[name], gates, group_rows_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gates,) = ctx.saved_tensors
        bias = ctx.borrowed.tensors[ctx.name]
        if ctx.name in ctx.borrowed.trained:
            ctx.borrowed.grads[ctx.name] = _bias_grad(grads[0], bias, gates, ctx.group_rows_S)
        gate_grad = _bias_gate_grad(grads[0], bias, gates, ctx.group_rows_S) if ctx.needs_input_grad[1] else None
        return grads[0], gate_grad, None, None, None

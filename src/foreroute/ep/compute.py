"""What this rank computes, on rows that are already in order of their group: its home experts, and its replicas.

Home experts compute with the rank's own parameters. A replica computes with weights that are only borrowed for the
pass, and its gradients are sent home. The layouts are those of experts modules in transformers 5, told by their
attributes: `has_gate`, `has_bias`, `is_transposed` and the method `_apply_gate`, which also knows whether gate and up
are concatenated or interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreroute.ep.transfer import Cell, PendingGradients, ReplicaWeights
from foreroute.ep.transfer.replica_weights import segment_sums
from foreroute.errors import AttachError, TransferError
from foreroute.plan import CellPlan

LEAST_TORCH = "2.10"
"""The first with torch.nn.functional.grouped_mm; what pyproject.toml asks for."""

LEAST_ROWS = {("cpu", torch.float32): 16}
"""Below this many rows, BLAS computes a row with another order of sums than in a larger GEMM: found by trying, below 4
on one CPU, and on another below 5 for rows of 96, and below 16 for rows of 384 and more."""

WHOLE_VECTORS = 64
"""So many rows of any width fill whole SIMD registers. The CPU computes what is left one by one, with another exp."""


def run_experts(
    module: Any, weights: Mapping[str, Tensor], rows_RD: Tensor, gates_R1: Tensor, group_rows_S: Sequence[int]
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


def least_rows(weights: Mapping[str, Tensor]) -> int:
    """How many rows a group must have for the bits of a row not to depend on how many there are."""
    weight = weights["down_proj"]
    return LEAST_ROWS.get((weight.device.type, weight.dtype), 1)


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
    group_rows_S: Sequence[int],
) -> Tensor:
    """Of rows that are weighted already, where there are gate weights: they weight the bias alone."""
    weight = weights[name] if module.is_transposed else weights[name].transpose(-2, -1)
    out = _grouped_mm(rows.to(weight.dtype), weight, group_rows_S)
    if not module.has_bias:
        return out
    biased: Tensor = AddBias.apply(out, weights[f"{name}_bias"], gates_R1, group_rows_S)
    return biased


class AddBias(torch.autograd.Function):
    """`AddBias.apply(rows_RD, bias_SD, gates_R1, group_rows_S)`: rows plus the bias of their group; keeps no row.

    The bias is weighted where there are gate weights.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, gates: Tensor | None, group_rows_S: Sequence[int]) -> Tensor:
        ctx.save_for_backward(bias, gates)
        ctx.group_rows_S = group_rows_S
        added = _of_group(bias, group_rows_S)
        return (rows + (added if gates is None else added * gates)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        bias, gates = ctx.saved_tensors
        grad, bias_grad, gate_grad = grads[0], None, None
        if ctx.needs_input_grad[1]:
            bias_grad = segment_sums(grad if gates is None else grad * gates, ctx.group_rows_S).to(bias.dtype)
        if ctx.needs_input_grad[2]:
            gate_grad = (grad * _of_group(bias, ctx.group_rows_S)).sum(dim=1, keepdim=True).to(gates.dtype)
        return grad, bias_grad, gate_grad, None


def _of_group(bias: Tensor, group_rows_S: Sequence[int]) -> Tensor:
    """[S, D] to [R, D], that of every row's group."""
    sizes = torch.tensor(group_rows_S).to(bias.device, non_blocking=True)
    return bias.repeat_interleave(sizes, dim=0, output_size=sum(group_rows_S))


def _grouped_mm(rows: Tensor, weight: Tensor, group_rows_S: Sequence[int]) -> Tensor:
    if rows.dtype == torch.float64:  # which grouped_mm lacks
        parts = zip(rows.split(list(group_rows_S)), weight.unbind(0), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])
    ends = torch.tensor(group_rows_S).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
    return functional.grouped_mm(rows, weight, offs=ends)


@dataclass(eq=False)
class ReplicaTransfers:
    """Where replicas come from in one pass over a cell, and where their gradients go.

    Attributes:
        cell: which cell runs.
        source: of the weights.
        names: of the parameters of the home shard.
        returning: gradients that backward has sent home and not waited for yet.
    """

    cell: Cell
    source: ReplicaWeights
    names: tuple[str, ...]
    pending: PendingGradients | None = None


@dataclass(frozen=True, eq=False)
class Replicas:
    """The replicas of a cell, for one pass.

    Attributes:
        transfers: of the pass.
        plan: of the cell.
        weights: name -> [replicas here, ...], valid until the source is asked for another cell.
        home: name -> [E / G, ...], this rank's shard, from `ReceiveGradients`.
    """

    transfers: ReplicaTransfers
    plan: CellPlan
    weights: Mapping[str, Tensor]
    home: Mapping[str, Tensor]

    @classmethod
    def fetched(
        cls, cell: Cell, plan: CellPlan, source: ReplicaWeights, home: Mapping[str, nn.Parameter]
    ) -> Replicas | None:
        """All ranks call it, before they dispatch the rows of the cell; None when the homes serve it."""
        weights = source.fetch(cell, {name: shard.detach() for name, shard in home.items()})
        if weights is None:
            return None
        transfers = ReplicaTransfers(cell, source, tuple(home))
        brought = ReceiveGradients.apply(transfers, *home.values())
        return cls(transfers, plan, weights, dict(zip(home, brought, strict=True)))


@dataclass(frozen=True, eq=False)
class ReplicaWork:
    """What backward needs to know of a forward pass.

    Attributes:
        transfers: of the pass.
        module: the experts module, for its layout.
        group_rows_S: rows of each replica here.
    """

    transfers: ReplicaTransfers
    module: Any
    group_rows_S: list[int]


class ReceiveGradients(torch.autograd.Function):
    """`ReceiveGradients.apply(transfers, *home)`: the home shards as they are, with the gradients that come to them.

    `ComputeReplicas` sends gradients, which are waited for here. Autograd takes nodes that were made later first. This
    one is made before the rows are dispatched, so that while gradients travel, backward computes the home experts and
    sends the gradients of rows back. The order is the same on all ranks, since they make the same nodes.
    """

    @staticmethod
    def forward(ctx: Any, transfers: ReplicaTransfers, *home: Tensor) -> tuple[Tensor, ...]:
        ctx.transfers = transfers
        ctx.set_materialize_grads(False)
        views = tuple(shard.view_as(shard) for shard in home)
        ctx.mark_non_differentiable(
            *(view for view, needs in zip(views, ctx.needs_input_grad[1:], strict=True) if not needs)
        )
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        transfers: ReplicaTransfers = ctx.transfers
        assert transfers.pending is not None, "ComputeReplicas comes first, which alone is given these shards"
        returned, transfers.pending = transfers.pending.wait(), None
        return None, *(returned.get(name) for name in transfers.names)


class ComputeReplicas(torch.autograd.Function):
    """`ComputeReplicas.apply(rows_RD, gates_R1, weights, work, *home)`: [R, D], by `run_experts`.

    Gradients of weights go to `ReceiveGradients`. Autograd keeps rows and gate weights and nothing else. Backward asks
    for the weights once more, whose slots may have served other cells since, and computes the rows again. All ranks
    call it for a cell that has replicas on any of them, so that all take part in both exchanges.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, gates_R1: Tensor, weights: Mapping[str, Tensor], work: ReplicaWork, *home: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_RD, gates_R1, *home)
        ctx.work = work
        if not work.group_rows_S:
            return rows_RD.new_empty(rows_RD.shape, dtype=home[0].dtype)
        return run_experts(work.module, weights, rows_RD, gates_R1, work.group_rows_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, gates_R1, *home = ctx.saved_tensors
        work: ReplicaWork = ctx.work
        transfers = work.transfers
        fetched = transfers.source.fetch(transfers.cell, dict(zip(transfers.names, home, strict=True)))
        if fetched is None:
            raise TransferError(
                f"replicas computed the forward pass of {transfers.cell}, and cannot be had again for backward"
            )
        wanted = [name for i, name in enumerate(transfers.names) if ctx.needs_input_grad[4 + i]]
        row_grad, gate_grad, weight_grads = _gradients(work, rows_RD, gates_R1, fetched, wanted, grads[0])
        if wanted:
            transfers.pending = transfers.source.send_home(transfers.cell, weight_grads)
        return row_grad, gate_grad, None, None, *(None for _ in home)


def _gradients(
    work: ReplicaWork,
    rows_RD: Tensor,
    gates_R1: Tensor,
    fetched: Mapping[str, Tensor],
    wanted: list[str],
    grad: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of the rows, of their gate weights, and of those weights that are wanted."""
    if not work.group_rows_S:
        none = {name: torch.zeros_like(fetched[name]) for name in wanted}
        return torch.zeros_like(rows_RD), torch.zeros_like(gates_R1), none
    with torch.enable_grad():
        rows, gates = rows_RD.detach().requires_grad_(), gates_R1.detach().requires_grad_()
        weights = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in fetched.items()}
        out = run_experts(work.module, weights, rows, gates, work.group_rows_S)
    row_grad, gate_grad, *weight_grads = torch.autograd.grad(
        out, [rows, gates, *(weights[name] for name in wanted)], grad
    )
    return row_grad, gate_grad, dict(zip(wanted, weight_grads, strict=True))

"""The replicas of a rank: computed with weights that are only borrowed, and their gradients sent home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foreroute.ep.compute import run_experts
from foreroute.ep.transfer import Cell, ReplicaWeights, Returning
from foreroute.errors import TransferError
from foreroute.plan import CellPlan


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
    returning: Returning | None = None


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
        assert transfers.returning is not None, "ComputeReplicas comes first, which alone is given these shards"
        returned, transfers.returning = transfers.returning.wait(), None
        return None, *(returned.get(name) for name in transfers.names)


class ComputeReplicas(torch.autograd.Function):
    """`ComputeReplicas.apply(rows_RD, weights, work, *home)`: [R, D]. Gradients of weights go to `ReceiveGradients`.

    Autograd keeps the rows and nothing else. Backward asks for the weights once more, whose slots may have served other
    cells since, and computes the rows again. All ranks call it for a cell that has replicas on any of them, so that all
    take part in both exchanges.
    """

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights: Mapping[str, Tensor], work: ReplicaWork, *home: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, *home)
        ctx.work = work
        if not work.group_rows_S:
            return rows_RD.new_empty(rows_RD.shape, dtype=home[0].dtype)
        return run_experts(work.module, weights, rows_RD, work.group_rows_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, *home = ctx.saved_tensors
        work: ReplicaWork = ctx.work
        transfers = work.transfers
        fetched = transfers.source.fetch(transfers.cell, dict(zip(transfers.names, home, strict=True)))
        if fetched is None:
            raise TransferError(
                f"replicas computed the forward pass of {transfers.cell}, and cannot be had again for backward"
            )
        wanted = [name for i, name in enumerate(transfers.names) if ctx.needs_input_grad[3 + i]]
        row_grad, weight_grads = _gradients(work, rows_RD, fetched, wanted, grads[0])
        if wanted:
            transfers.returning = transfers.source.send_home(transfers.cell, weight_grads)
        return row_grad, None, None, *(None for _ in home)


def _gradients(
    work: ReplicaWork, rows_RD: Tensor, fetched: Mapping[str, Tensor], wanted: list[str], grad: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the rows, and of those weights that are wanted."""
    if not work.group_rows_S:
        return torch.zeros_like(rows_RD), {name: torch.zeros_like(fetched[name]) for name in wanted}
    with torch.enable_grad():
        rows = rows_RD.detach().requires_grad_()
        weights = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in fetched.items()}
        out = run_experts(work.module, weights, rows, work.group_rows_S)
    row_grad, *weight_grads = torch.autograd.grad(out, [rows, *(weights[name] for name in wanted)], grad)
    return row_grad, dict(zip(wanted, weight_grads, strict=True))

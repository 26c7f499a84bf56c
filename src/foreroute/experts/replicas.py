"""The replicas of a rank: computed with weights that are only borrowed, and their gradients sent home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foreroute.balance import CellPlan
from foreroute.errors import TransferError
from foreroute.experts.compute import run_experts
from foreroute.transfer import Cell, ReplicaWeights


@dataclass(frozen=True, eq=False)
class Replicas:
    """The replicas of a cell, for one pass.

    Attributes:
        cell: which cell runs.
        plan: of it.
        source: of the weights.
        weights: name -> [replicas here, ...], valid until the source is asked for another cell.
    """

    cell: Cell
    plan: CellPlan
    source: ReplicaWeights
    weights: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class ReplicaWork:
    """What backward needs to know of a forward pass.

    Attributes:
        cell: which cell ran.
        source: of the weights.
        module: the experts module, for its layout.
        group_rows_S: rows of each replica here.
        names: of the parameters of the home shard.
    """

    cell: Cell
    source: ReplicaWeights
    module: Any
    group_rows_S: list[int]
    names: tuple[str, ...]


class RunReplicas(torch.autograd.Function):
    """`RunReplicas.apply(rows_RD, weights, work, *home)`: [R, D], with the gradient of the homes brought home.

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
        fetched = work.source.fetch(work.cell, dict(zip(work.names, home, strict=True)))
        if fetched is None:
            raise TransferError(
                f"replicas computed the forward pass of {work.cell}, and cannot be had again for backward"
            )
        wanted = [name for i, name in enumerate(work.names) if ctx.needs_input_grad[3 + i]]
        row_grad, weight_grads = _gradients(work, rows_RD, fetched, wanted, grads[0])
        home_grads = work.source.send_home(work.cell, weight_grads) if wanted else {}
        return row_grad, None, None, *(home_grads.get(name) for name in work.names)


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

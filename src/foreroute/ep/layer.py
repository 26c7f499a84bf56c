"""One routed layer, expert-parallel: its rows are sent to the ranks that serve them, computed there, and sent back.

`DispatchHandle` turns a `CellSchedule`, which is arithmetic on counts, into tokens. `Dispatch` sends rows to the ranks
that serve them and `Combine` brings results back and adds them up: each is the other's transpose, so that neither keeps
a row. Gate weights travel with the rows and are applied where an expert computes. Applied at the source, what comes
back would have to be kept for their gradient, K rows of D for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.compute import StackedReplicas, row_multiple, run_experts
from foreroute.ep.execution import Execution
from foreroute.ep.shards import ExpertShards
from foreroute.ep.transfer.peers import collective_errors
from foreroute.errors import CountsError
from foreroute.plan import CellPlan, CellSchedule


class ExpertLayer:
    """Stands in for the forward of an experts module.

    Args:
        number: position of the layer among the routed layers.
        path: of the module in the model, for errors.
        shards: this rank's experts.
        group: the ranks.
        in_force: gives the execution in force when the layer is called.
    """

    def __init__(
        self, number: int, path: str, shards: ExpertShards, group: dist.ProcessGroup, in_force: Callable[[], Execution]
    ) -> None:
        self.number = number
        self.path = path
        self.shards = shards
        self._group = group
        self._in_force = in_force

    def __call__(self, hidden_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Send every row to its experts, wherever they are served, and add up what comes back.

        Args:
            hidden_ND: [N, D], this rank's rows.
            ids_NK: integers [N, K], the experts of each.
            weights_NK: [N, K], their gate weights; applied where the experts compute.

        Returns:
            [N, D].

        Raises:
            CountsError: when counts are exchanged and are not those of the plan; on every rank alike.
            PlanError: when a plan gives replicas more than there is; on every rank alike.
            TransferError: when a rank or its weights cannot be reached.
        """
        execution = self._in_force()
        execution.begin_layer(self.number, self.path)
        self._require_rows(execution, len(ids_NK))
        ids_NK = ids_NK.to(torch.int64)
        home_E = self.shards.home_E
        planned = execution.cell(self.number)
        replicas = None
        shards = self.shards.parameters
        experts: Mapping[str, Tensor] = shards
        if planned is not None:
            cell, _, weights = planned
            replicas = StackedReplicas(cell, weights, shards, is_recompute=execution.is_recomputing)
            experts = dict(zip(shards, replicas.announce(), strict=True))
        counts_GE = execution.counts_GE(self.number, ids_NK, len(home_E))
        rows = execution.schedule(self.number)
        if rows is None:
            rows = CellSchedule.of(
                CellPlan.homes_only(home_E, len(counts_GE)) if planned is None else planned[1],
                counts_GE,
                dist.get_rank(self._group),
                row_multiple=row_multiple(self.shards.tensors),
                what=execution.what(self.number),
            )
        handle = DispatchHandle.of(
            self._group, f"tokens of {execution.what(self.number)}", rows, ids_NK, execution.sent_rows(ids_NK.device)
        )
        grouped, gates = Dispatch.apply(hidden_ND, weights_NK, handle)
        if replicas is not None:
            replicas.fetch()
        execution.end_layer(self.number, sum(handle.receive_G))
        summed: Tensor = Combine.apply(self._compute(grouped, gates, rows, experts, replicas), handle)
        return summed.to(hidden_ND.dtype)

    def _compute(
        self,
        grouped: Tensor,
        gates: Tensor,
        rows: CellSchedule,
        experts: Mapping[str, Tensor],
        replicas: StackedReplicas | None,
    ) -> Tensor:
        """[rows computed, D] in order of group, and their gate weights, to [rows computed, D].

        Args:
            grouped: [rows computed, D].
            gates: [rows computed, 1].
            rows: of each group.
            experts: name -> [E / G, ...], home experts.
            replicas: of the cell, on any rank; None where it has none, so that homes serve all.
        """
        module: Any = self.shards.module
        sizes_S, num_home = rows.group_rows_S.tolist(), rows.num_home
        num_home_rows = sum(sizes_S[:num_home])
        # a norm of what experts give out forgets its scale: gate weights come after it
        norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
        scale = gates if norm is None else torch.ones_like(gates)
        computed = run_experts(module, experts, grouped[:num_home_rows], scale[:num_home_rows], sizes_S[:num_home])
        if replicas is not None:
            served = replicas.compute(module, grouped[num_home_rows:], scale[num_home_rows:], sizes_S[num_home:])
            computed = torch.cat([computed, served])
        return computed if norm is None else norm(computed) * gates

    def _require_rows(self, execution: Execution, num_rows: int) -> None:
        for mask_N in (execution.rows.planned_N, execution.rows.sent_N):
            if mask_N is not None and len(mask_N) != num_rows:
                raise CountsError(
                    f"{self.path} is given {num_rows} rows, BatchRows tells of {len(mask_N)}; make it from the batch "
                    "that the model is called with, padding included"
                )


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """Where the rows of one call go.

    Attributes:
        group: the ranks.
        what: the call in words, for errors.
        send_G, receive_G: rows to and from every rank.
        token_R: int64 [rows sent], the token of each.
        assignment_R: int64 [rows sent], its number among the N x K assignments.
        sent_row_A: int64 [N x K], the row that each assignment is sent as; one past the last where it is not sent.
        grouped_R: int64 [rows computed], the received row of each, in order of group; one past the last for padding.
        returned_R: int64 [rows received], the computed row of each.
        top_k: K.
    """

    group: dist.ProcessGroup
    what: str
    send_G: list[int]
    receive_G: list[int]
    token_R: Tensor
    assignment_R: Tensor
    sent_row_A: Tensor
    grouped_R: Tensor
    returned_R: Tensor
    top_k: int

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, what: str, rows: CellSchedule, ids_NK: Tensor, sent_N: Tensor | None
    ) -> DispatchHandle:
        """Turn every rank's share of every expert into tokens.

        Args:
            group: the ranks.
            what: the call in words.
            rows: how many go where.
            ids_NK: int64 [N, K], the expert of each assignment.
            sent_N: int64 [tokens sent], ascending; None for all N.
        """
        device, top_k = ids_NK.device, ids_NK.shape[1]
        ids_RK = ids_NK if sent_N is None else ids_NK.index_select(0, sent_N)
        by_expert = ids_RK.reshape(-1).argsort(stable=True)
        sent_R = by_expert.index_select(0, expand(rows.taken, device))
        token_R = sent_R // top_k if sent_N is None else sent_N.index_select(0, sent_R // top_k)
        assignment_R = token_R * top_k + sent_R % top_k
        sent_row_A = torch.full((ids_NK.numel(),), len(sent_R), dtype=torch.int64, device=device)
        sent_row_A[assignment_R] = torch.arange(len(sent_R), device=device)
        send_G, receive_G = rows.send_G.tolist(), rows.receive_G.tolist()
        # padding lies beyond what is received
        grouped_R = expand(rows.grouped, device).clamp(max=sum(receive_G))
        returned_R = expand(rows.returned, device)
        return cls(group, what, send_G, receive_G, token_R, assignment_R, sent_row_A, grouped_R, returned_R, top_k)

    def to_experts(self, hidden_ND: Tensor, gates_NK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens and their gate weights to [rows computed, D] and [rows computed, 1]; zeros for padding."""
        gates_R1 = None if gates_NK is None else gates_NK.reshape(-1, 1).index_select(0, self.assignment_R)
        rows, gates = self._exchange(hidden_ND, self.token_R, gates_R1, self.send_G, self.receive_G)
        return _taken(rows, gates, self.grouped_R)

    def to_tokens(self, rows_RD: Tensor, gates_R1: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Computed rows to [N, D], added up over the picks of a token in their order, and what is beside them to
        [N, K]; zeros for what was not sent.
        """
        gates_R1 = None if gates_R1 is None else gates_R1.index_select(0, self.returned_R)
        arrived = self._exchange(rows_RD, self.returned_R, gates_R1, self.receive_G, self.send_G)
        picks, gates = _taken(*arrived, self.sent_row_A)
        gates_NK = None if gates is None else gates.view(-1, self.top_k)
        return picks.view(-1, self.top_k, picks.shape[1]).sum(dim=1), gates_NK

    def _exchange(
        self, rows: Tensor, chosen: Tensor, beside: Tensor | None, send_G: list[int], receive_G: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """The chosen rows, and one number beside each, from all ranks; and one more of zeros.

        From the last one is taken what was not sent, and what pads a group. Both travel in one message: the number lies
        in front of the row, in as many columns as hold it.
        """
        width = rows.shape[1]
        front = 0 if beside is None else -(-beside.element_size() // rows.element_size())
        packed = rows.new_empty(len(chosen), front + width + (-width % front if front else 0))
        torch.index_select(rows, 0, chosen, out=packed[:, front : front + width])
        if beside is not None:
            packed[:, :front].view(beside.dtype)[:, :1] = beside
        total = sum(receive_G)
        arrived = rows.new_empty(total + 1, packed.shape[1])
        arrived[total] = 0
        with collective_errors(self.what, self.group):
            dist.all_to_all_single(arrived[:total], packed, receive_G, send_G, group=self.group)
        numbers = None if beside is None else arrived[:, :front].view(beside.dtype)[:, :1]
        return arrived[:, front : front + width], numbers


class Dispatch(torch.autograd.Function):
    """`Dispatch.apply(hidden_ND, gates_NK, handle)`: rows in order of group [R, D], and their gate weights [R, 1].

    A token's gradients are added over its picks in their order, so that the sum does not depend on where they went.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, gates_NK: Tensor, handle: DispatchHandle) -> tuple[Tensor, Tensor]:
        ctx.handle = handle
        rows, gates = handle.to_experts(hidden_ND, gates_NK)
        assert gates is not None, "as many come as are sent"
        return rows, gates

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        handle: DispatchHandle = ctx.handle
        return *handle.to_tokens(grads[0], grads[1]), None


class Combine(torch.autograd.Function):
    """`Combine.apply(computed_RD, handle)`: results to their source and added up, [N, D]; zeros for rows not sent."""

    @staticmethod
    def forward(ctx: Any, computed_RD: Tensor, handle: DispatchHandle) -> Tensor:
        ctx.handle = handle
        return handle.to_tokens(computed_RD, None)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        handle: DispatchHandle = ctx.handle
        return handle.to_experts(grads[0], None)[0], None


def _taken(rows: Tensor, beside: Tensor | None, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
    return rows.index_select(0, chosen), None if beside is None else beside.index_select(0, chosen)


def expand(runs: NDArray[np.int64], device: torch.device) -> Tensor:
    """int64, the index of every row of every run of a `CellSchedule`; the device is not waited for."""
    total = int(runs[:, 1].sum())
    start_B, length_B = torch.from_numpy(runs).to(device, non_blocking=True).unbind(1)
    # Within a run, index and place in the result rise together: their difference is one number per run.
    shift_B = start_B - (length_B.cumsum(0) - length_B)
    return shift_B.repeat_interleave(length_B, output_size=total) + torch.arange(total, device=device)

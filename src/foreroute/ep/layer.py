"""One routed layer, expert-parallel: its rows are sent to the ranks that serve them, computed there, and sent back.

`DispatchHandle` turns a `CellSchedule`, which is arithmetic on counts, into tokens. `Dispatch` sends rows to the ranks
that serve them and `Combine` brings results back and adds them up: each is the other's transpose, so that neither keeps
a row. Gate weights travel with the rows and are applied where an expert computes. Applied at the source, what comes
back would have to be kept for their gradient, K rows of D for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.ep.compute import StackedReplicas, row_multiple, run_experts
from foreroute.ep.execution import CellRows, Execution
from foreroute.ep.shards import LogicalExperts
from foreroute.ep.transfer.peers import collective_errors
from foreroute.errors import PlacementError


class ExpertLayer:
    """One experts module, of which this rank keeps its home experts, and what stands in for its forward.

    This rank's experts are in ascending order of their id. Logical order is that of expert ids, whatever rank they live
    on: row e of a full tensor is expert e.

    The state dict of the module, and so of every module around it, holds `LogicalExperts` for each parameter.

    Args:
        number: position of the layer among the routed layers.
        path: of the module in the model, for errors.
        module: of whose parameters `keep_rows` has left this rank's.
        home_E: int16 [E], the rank that every expert lives on.
        group: the ranks.
        in_force: gives the execution in force when the layer is called.
    """

    def __init__(
        self,
        number: int,
        path: str,
        module: nn.Module,
        home_E: NDArray[np.int16],
        group: dist.ProcessGroup,
        in_force: Callable[[], Execution],
    ) -> None:
        self.number = number
        self.path = path
        self.module = module
        self.home_E = home_E
        self._names = tuple(name for name, _ in module.named_parameters(recurse=False))
        self._group = group
        self._in_force = in_force
        # torch marks what it is given, and a method cannot be
        module.register_state_dict_post_hook(partial(self._give_logical))
        module.register_load_state_dict_pre_hook(self._take_own)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What this rank holds, name -> [E / G, ...]."""
        return {name: self.module.get_parameter(name) for name in self._names}

    def __call__(self, hidden_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Send every row to its experts, wherever they are served, and add up what comes back.

        Args:
            hidden_ND: [N, D], this rank's rows.
            ids_NK: integers [N, K], the experts of each.
            weights_NK: [N, K], their gate weights; applied where the experts compute.

        Returns:
            [N, D].

        Raises:
            ReplayError, CountsError, PlanError: as `Execution.begin_cell`.
            TransferError: when a rank or its weights cannot be reached.
        """
        execution, shards = self._in_force(), self.parameters
        ids_NK = ids_NK.to(torch.int64)
        rows = execution.begin_cell(self.number, self.path, ids_NK, self.home_E, row_multiple(shards))
        served, replicas = execution.served(self.number), None
        experts: Mapping[str, Tensor] = shards
        if served is not None:
            replicas = StackedReplicas(*served, shards, is_recompute=execution.is_recomputing)
            experts = dict(zip(shards, replicas.announce(), strict=True))
        handle = DispatchHandle.of(
            self._group, execution.names[self.number], rows, ids_NK, execution.sent_assignments(ids_NK)
        )
        grouped, gates = Dispatch.apply(hidden_ND, weights_NK, handle)
        if replicas is not None:
            replicas.fetch()
        summed: Tensor = Combine.apply(self._compute(grouped, gates, rows, experts, replicas), handle)
        return summed.to(hidden_ND.dtype)

    def _compute(
        self,
        grouped: Tensor,
        gates: Tensor,
        rows: CellRows,
        experts: Mapping[str, Tensor],
        replicas: StackedReplicas | None,
    ) -> Tensor:
        """[rows computed, D] in order of group, and their gate weights, to [rows computed, D].

        Args:
            grouped: [rows computed, D].
            gates: [rows computed, 1].
            rows: of the cell.
            experts: name -> [E / G, ...], home experts.
            replicas: of the cell, on any rank; None where it has none, so that homes serve all.
        """
        module: Any = self.module
        # a norm of what experts give out forgets its scale: gate weights come after it
        norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
        scale = gates if norm is None else torch.ones_like(gates)
        if replicas is None:
            computed = run_experts(module, experts, grouped, scale, rows.home)
        else:
            parts = [sum(rows.home.sizes_S), sum(rows.replicas.sizes_S)]
            (at_home, lent), (scale, lent_scale) = grouped.split(parts), scale.split(parts)
            computed = run_experts(module, experts, at_home, scale, rows.home)
            computed = torch.cat([computed, replicas.compute(module, lent, lent_scale, rows.replicas)])
        return computed if norm is None else norm(computed) * gates

    def own_rows(self, full: Tensor) -> Tensor:
        """[E, ...] in logical order to a new [E / G, ...], the rows that live here."""
        return full.detach().index_select(0, torch.from_numpy(self._here()).to(full.device))

    def gather(self, local: Tensor) -> Tensor:
        """[E / G, ...] on every rank to a new [E, ...] in logical order, on every rank. A collective call."""
        num_ranks = dist.get_world_size(self._group)
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(num_ranks)]
        with collective_errors("gathering experts", self._group):
            dist.all_gather(parts, local.detach().contiguous(), group=self._group)
        held = torch.from_numpy(np.argsort(self.home_E, kind="stable")).to(local.device)
        full = torch.empty((len(held), *local.shape[1:]), dtype=local.dtype, device=local.device)
        full[held] = torch.cat(parts)
        return full

    def logical(self, local: Tensor) -> LogicalExperts:
        """[E / G, ...] as this rank's part of [E, ...] in logical order, of which it is the memory; nothing is sent."""
        return LogicalExperts(local.detach(), self._here(), len(self.home_E))

    def _here(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.home_E == dist.get_rank(self._group))

    def _give_logical(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in self._names:
            state[prefix + name] = self.logical(state[prefix + name])

    def _take_own(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Cut what is given whole to this rank's rows, and take back what `_give_logical` has given."""
        for name in self._names:
            given = state.get(prefix + name)
            if isinstance(given, LogicalExperts):
                if not np.array_equal(given.experts, self._here()):
                    raise PlacementError(
                        f"{self.path}.{name} is of other experts than live here; take state_dict() anew after homes "
                        "have moved, and load the checkpoint into it"
                    )
                state[prefix + name] = given.local
            elif isinstance(given, Tensor):
                if len(given) != len(self.home_E):
                    raise PlacementError(
                        f"{self.path}.{name} has {len(given)} experts, expected all {len(self.home_E)} in order of "
                        "their ids; load what state_dict() of the placed model, or of the model before, gives"
                    )
                state[prefix + name] = self.own_rows(given)


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """Where the rows of one call go.

    Attributes:
        group: the ranks.
        what: the cell in words, for errors.
        rows: of the cell.
        token_R: int64 [rows sent], the token of each.
        assignment_R: int64 [rows sent], its number among the N x K assignments.
        sent_row_A: int64 [N x K], the row that each assignment is sent as; one past the last where it is not sent.
        top_k: K.
    """

    group: dist.ProcessGroup
    what: str
    rows: CellRows
    token_R: Tensor
    assignment_R: Tensor
    sent_row_A: Tensor
    top_k: int

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, what: str, rows: CellRows, ids_NK: Tensor, sent_A: Tensor | None
    ) -> DispatchHandle:
        """Turn every rank's share of every expert into tokens.

        Args:
            group: the ranks.
            what: the cell in words.
            rows: how many go where.
            ids_NK: int64 [N, K], the expert of each assignment.
            sent_A: int64, which assignments are sent, ascending; None for all.
        """
        ids_A, top_k = ids_NK.reshape(-1), ids_NK.shape[1]
        by_expert = (ids_A if sent_A is None else ids_A.index_select(0, sent_A)).argsort(stable=True)
        assignment_R = by_expert.index_select(0, rows.taken_R)
        if sent_A is not None:
            assignment_R = sent_A.index_select(0, assignment_R)
        num_sent = len(assignment_R)
        sent_row_A = torch.full_like(ids_A, num_sent)
        sent_row_A[assignment_R] = torch.arange(num_sent, device=ids_A.device)
        return cls(group, what, rows, assignment_R // top_k, assignment_R, sent_row_A, top_k)

    def to_experts(self, hidden_ND: Tensor, gates_NK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens and their gate weights to [rows computed, D] and [rows computed, 1]; zeros for padding."""
        rows, gates = self.rows, None if gates_NK is None else gates_NK.reshape(-1, 1)
        arrived, beside = self._exchange(hidden_ND, self.token_R, gates, self.assignment_R, rows.send_G, rows.receive_G)
        beside = None if beside is None else beside.index_select(0, rows.grouped_R)
        return arrived.index_select(0, rows.grouped_R), beside

    def to_tokens(self, rows_RD: Tensor, gates_R1: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Computed rows to [N, D], added up over the picks of a token in their order, and what is beside them to
        [N, K]; zeros for what was not sent.
        """
        rows, chosen = self.rows, self.rows.returned_R
        arrived, beside = self._exchange(rows_RD, chosen, gates_R1, chosen, rows.receive_G, rows.send_G)
        if beside is not None:
            beside = beside.index_select(0, self.sent_row_A).view(-1, self.top_k)
        picks = arrived.index_select(0, self.sent_row_A)
        return picks.view(-1, self.top_k, picks.shape[1]).sum(dim=1), beside

    def _exchange(
        self,
        rows: Tensor,
        chosen: Tensor,
        beside: Tensor | None,
        chosen_beside: Tensor,
        send_G: list[int],
        receive_G: list[int],
    ) -> tuple[Tensor, Tensor | None]:
        """The chosen rows, and one number beside each, from all ranks; and rows of zeros behind them.

        From these is taken what was not sent, and what pads a group. Both travel in one message: the number lies in
        front of the row, in as many columns as hold it.
        """
        total, width = sum(receive_G), rows.shape[1]
        if beside is None:
            packed = rows.index_select(0, chosen)
        else:
            front = -(-beside.element_size() // rows.element_size())
            columns = [front, width, -width % front]
            packed = rows.new_empty(len(chosen), sum(columns))
            numbers, values, _ = packed.split(columns, dim=1)
            torch.index_select(rows, 0, chosen, out=values)
            torch.index_select(beside, 0, chosen_beside, out=_as_numbers(numbers, beside.dtype))
        whole = rows.new_empty(total + self.rows.num_zeros, packed.shape[1])
        arrived, zeros = whole.split([total, self.rows.num_zeros])
        zeros.zero_()
        with collective_errors(f"tokens of {self.what}", self.group):
            dist.all_to_all_single(arrived, packed, receive_G, send_G, group=self.group)
        if beside is None:
            return whole, None
        numbers, values, _ = whole.split(columns, dim=1)
        return values, _as_numbers(numbers, beside.dtype)


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


def _as_numbers(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """One number of each row, of the dtype that its first columns hold."""
    return columns if columns.dtype == dtype else columns.view(dtype)[:, :1]

"""One routed layer, expert-parallel: its rows are sent to the ranks that serve them, computed there, and sent back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foreroute.ep.compute import StackedReplicas, row_multiple, run_experts
from foreroute.ep.dispatch import Combine, Dispatch, DispatchHandle, MicroStepRows
from foreroute.ep.execution import Execution
from foreroute.ep.shards import ExpertShards
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
        rows = execution.rows_of(self.number, ids_NK.device)
        if rows is None:
            found = CellSchedule.of(
                CellPlan.homes_only(home_E, len(counts_GE)) if planned is None else planned[1],
                counts_GE,
                dist.get_rank(self._group),
                row_multiple=row_multiple(self.shards.tensors),
                what=execution.what(self.number),
            )
            rows = MicroStepRows({self.number: found}, ids_NK.device)[self.number]
        handle = DispatchHandle.of(
            self._group, f"tokens of {execution.what(self.number)}", rows, ids_NK, execution.sent_rows(ids_NK.device)
        )
        grouped, gates = Dispatch.apply(hidden_ND, weights_NK, handle)
        if replicas is not None:
            replicas.fetch()
        execution.end_layer(self.number, sum(handle.receive_G))
        summed: Tensor = Combine.apply(self._compute(grouped, gates, rows.schedule, experts, replicas), handle)
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

"""One routed layer, expert-parallel: its rows are sent to the ranks that serve them, computed there, and sent back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.ep.adapters import ExpertAdapter, with_adapters
from foreroute.ep.compute import StackedReplicas, row_multiple, run_experts
from foreroute.ep.dispatch import CellRows, Combine, Dispatch, DispatchHandle, gather_counts, rows_on
from foreroute.ep.execution import InForce
from foreroute.ep.shards import IN_FRONT, ExpertAxis, LogicalExperts, chosen
from foreroute.ep.transfer.peers import collective_errors
from foreroute.errors import PlacementError
from foreroute.plan import CellPlan
from foreroute.plan.schedule import CellSchedule


class HeldParameter(NamedTuple):
    """A parameter with experts, of which this rank has its own.

    Attributes:
        module: that it is a parameter of.
        name: there.
        axis: of the experts.
    """

    module: nn.Module
    name: str
    axis: ExpertAxis


class ExpertLayer:
    """One experts module, of which this rank keeps its home experts, and what stands in for its forward.

    This rank's experts are in ascending order of their id. Logical order is that of expert ids, whatever rank they live
    on: row e of a full tensor is expert e.

    The state dict of the module, and so of every module around it, holds `LogicalExperts` for each parameter; that of
    the factors of adapters too.

    Args:
        number: position of the layer among the routed layers.
        path: of the module in the model, for errors.
        module: of whose parameters `keep_experts` has left this rank's.
        home_E: int16 [E], the rank that every expert lives on.
        group: the ranks.
        in_force: says what it is to do in the pass that runs.
        adapters: of the parameters, cut likewise.
    """

    def __init__(
        self,
        number: int,
        path: str,
        module: nn.Module,
        home_E: NDArray[np.int16],
        group: dist.ProcessGroup,
        in_force: InForce,
        adapters: Sequence[ExpertAdapter] = (),
    ) -> None:
        self.number = number
        self.path = path
        self.module = module
        self.home_E = home_E
        self._adapters = adapters
        self._held = {name: HeldParameter(module, name, IN_FRONT) for name, _ in module.named_parameters(recurse=False)}
        for adapter in adapters:
            self._held |= {name: HeldParameter(factor, "weight", axis) for name, factor, axis in adapter.factors}
        self._group = group
        self._in_force = in_force
        for holder in {held.module for held in self._held.values()}:
            # torch marks what it is given, and a method cannot be
            holder.register_state_dict_post_hook(partial(self._give_logical))
            holder.register_load_state_dict_pre_hook(self._take_own)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What this rank holds of experts and of adapters, by name."""
        return {name: held.module.get_parameter(held.name) for name, held in self._held.items()}

    @property
    def home(self) -> dict[str, Tensor]:
        """The same as name -> [E / G, ...]: views, where experts are not in front."""
        return {name: self._held[name].axis.first(parameter) for name, parameter in self.parameters.items()}

    def axis_of(self, parameter: Tensor) -> ExpertAxis | None:
        """Of the experts in a parameter of this layer; None for others."""
        names = [name for name, own in self.parameters.items() if own is parameter]
        return self._held[names[0]].axis if names else None

    def __call__(self, hidden_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Send every row to its experts, wherever they are served, and add up what comes back.

        Args:
            hidden_ND: [N, D], this rank's rows.
            ids_NK: integers [N, K], the experts of each.
            weights_NK: [N, K], their gate weights; applied where the experts compute.

        Returns:
            [N, D].

        Raises:
            ReplayError: when a plan is executed, and this forward replays none of its routes.
            PlanError: when a plan gives replicas more than there is; on every rank alike.
            TransferError: when a rank or its weights cannot be reached.
        """
        work = self._in_force.work_of(self.number, self.path)
        ids_NK, sent_A = ids_NK.to(torch.int64), None
        terms = [adapter.term for adapter in self._adapters] if self._adapters else []
        shards: Mapping[str, Tensor] = self.home if terms else self.parameters
        experts: Mapping[str, Tensor] = shards
        replicas = None
        if work is None:
            what = f"routed layer {self.number}"
            rows = self._rows_at_home(self._counts(ids_NK.reshape(-1)), what)
        else:
            sent_A, what = work.sent(ids_NK.shape[1]), work.name
            ids_A = ids_NK.reshape(-1)
            rows = work.begin(self._counts(ids_A if sent_A is None else ids_A.index_select(0, sent_A)))
            if work.moves is not None:
                replicas = StackedReplicas(work.cell, work.engine, shards, terms)
                experts = dict(zip(shards, replicas.announce(), strict=True))
        handle = DispatchHandle.of(self._group, what, rows, ids_NK, sent_A)
        grouped, gates = Dispatch.apply(hidden_ND, weights_NK, handle)
        if replicas is not None:
            replicas.fetch()
        if terms:
            experts = with_adapters(experts, terms)
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

    def _counts(self, ids_A: Tensor) -> Tensor:
        """int64 [E]."""
        return ids_A.new_zeros(len(self.home_E)).index_add_(0, ids_A, torch.ones_like(ids_A))

    def _rows_at_home(self, counts_E: Tensor, what: str) -> CellRows:
        """Every expert serves where it lives, for which ranks exchange counts, and wait for them."""
        counts_GE = gather_counts(self._group, counts_E, what)
        cell, rank = CellPlan.homes_only(self.home_E, len(counts_GE)), dist.get_rank(self._group)
        schedule = CellSchedule.of(cell, counts_GE, rank, row_multiple=row_multiple(self.parameters), what=what)
        (rows,) = rows_on(counts_E.device, [schedule])
        return rows

    def own(self, full: Tensor, axis: ExpertAxis) -> Tensor:
        """The experts that live here, of a tensor of all in logical order; copied."""
        return chosen(full, self._here(), axis)

    def gather(self, local: Tensor, axis: ExpertAxis = IN_FRONT) -> Tensor:
        """What every rank has of a tensor to a new one of all experts in logical order, on every rank.

        A collective call.
        """
        num_ranks = dist.get_world_size(self._group)
        experts = axis.first(local.detach()).contiguous()
        parts = [torch.empty_like(experts) for _ in range(num_ranks)]
        with collective_errors("gathering experts", self._group):
            dist.all_gather(parts, experts, group=self._group)
        held = torch.from_numpy(np.argsort(self.home_E, kind="stable")).to(local.device)
        full = experts.new_empty((len(held), *experts.shape[1:]))
        full[held] = torch.cat(parts)
        return axis.back(full)

    def logical(self, local: Tensor, axis: ExpertAxis) -> LogicalExperts:
        """As this rank's part of a tensor of all experts in logical order, of which it is the memory."""
        return LogicalExperts(local.detach(), self._here(), len(self.home_E), axis)

    def _here(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.home_E == dist.get_rank(self._group))

    def _give_logical(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for held in self._held_by(module):
            state[prefix + held.name] = self.logical(state[prefix + held.name], held.axis)

    def _take_own(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Cut what is given whole to this rank's experts, and take back what `_give_logical` has given."""
        for held in self._held_by(module):
            given = state.get(prefix + held.name)
            if isinstance(given, LogicalExperts):
                if not np.array_equal(given.experts, self._here()):
                    raise PlacementError(
                        f"{prefix}{held.name} is of other experts than live here; take state_dict() anew after homes "
                        "have moved, and load the checkpoint into it"
                    )
                state[prefix + held.name] = given.local
            elif isinstance(given, Tensor):
                num_here, dim = len(self._here()), held.axis.dim
                num_given = given.shape[dim] * num_here / module.get_parameter(held.name).shape[dim]
                if num_given != len(self.home_E):
                    raise PlacementError(
                        f"{prefix}{held.name} has {num_given:g} experts, expected all {len(self.home_E)} in order of "
                        "their ids; load what state_dict() of the placed model, or of the model before, gives"
                    )
                state[prefix + held.name] = self.own(given, held.axis)

    def _held_by(self, module: nn.Module) -> list[HeldParameter]:
        return [held for held in self._held.values() if held.module is module]

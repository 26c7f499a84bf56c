"""One MoE layer while a plan is executed: columns before its dispatcher, replicas behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)
from torch import Tensor, nn

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.adapters.megatron.plan_execution.columns import CellColumns
from foreroute.adapters.megatron.plan_execution.dispatching import PlannedDispatcher
from foreroute.adapters.megatron.plan_execution.experts import objection_to_experts, replica_runner
from foreroute.adapters.megatron.plan_execution.replicas import SeparateReplicas
from foreroute.errors import PlacementError

DISPATCHERS = (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)
DDP_MODULE = "megatron.core.distributed.distributed_data_parallel"
REFUSED_SETTINGS = {
    "moe_expert_capacity_factor": "its capacity counts columns as experts",
    "moe_router_padding_for_quantization": "it adds rows to columns that no plan has counted",
    "fp8": "scaling factors belong to parameters, and a slot is none",
    "fp4": "scaling factors belong to parameters, and a slot is none",
    "moe_latent_size": "rows are projected between the layer and its dispatcher",
    "moe_apply_probs_on_input": "the experts module applies weights before its experts",
    "delay_wgrad_compute": "gradients of homes would come after those of their replicas, when buckets have left",
    "overlap_dispatch_backward_with_experts_wgrad": "it delays gradients of homes until buckets may have left",
    "quant_recipe": "its scaling factors belong to modules that it names, and a slot is in none",
    "add_bias_linear": "biases of experts are added by their module",
}
"""Settings of TransformerConfig, and why they and replicas exclude each other."""


@dataclass(frozen=True, eq=False)
class CellWork:
    """What a layer is to do in one pass over a cell.

    Attributes:
        columns: of the cell.
        planned_R: bool [R], the rows of this rank that the counts are of; None for all.
        counts_known: whether no rank has another row.
        replicas: of the cell, if any.
        note: told the rows that the experts of this rank compute.
    """

    columns: CellColumns
    planned_R: Tensor | None
    counts_known: bool
    replicas: SeparateReplicas
    note: Callable[[int], None]


class PlannedLayer:
    """Stands, on the instance, in a MoE layer's `preprocess` and `token_dispatcher` and in its experts' `forward`.

    Args:
        site: the layer's router.
        num_slots: P, redundant slots of each rank.
        begin: what the layer is to do in the pass that runs now.
    """

    def __init__(self, site: ChunkRouter, num_slots: int, begin: Callable[[], CellWork]) -> None:
        self._site = site
        self._block, self._experts = site.block, site.block.experts
        self._begin = begin
        self._dispatcher = PlannedDispatcher(self._block.token_dispatcher, num_slots)
        # the class's own: columns stand where the permutation of moved homes does
        self._preprocess = partial(type(self._block).preprocess, self._block)
        self._run_home = self._experts.forward
        self._run_replicas = replica_runner(self._experts)
        self._work: CellWork | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand there while the context is open, once."""
        with ExitStack() as stack:
            # Megatron's dispatchers keep tensors of their last pass, whose graph leads back here: a circle through
            # autograd, which nobody collects
            stack.callback(self.__dict__.pop, "_dispatcher")
            for module, name, stand_in in (
                (self._block, "preprocess", self._fill_columns),
                (self._block, "token_dispatcher", self._dispatcher.dispatcher),
                (self._experts, "forward", self._run_experts),
            ):
                stack.callback(_restore, module.__dict__, name, dict(module.__dict__))
                module.__dict__[name] = stand_in
            yield

    def _fill_columns(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """See `MoELayer.preprocess`. [R, E] each, and a map of bool."""
        num_experts = self._site.module.num_experts
        if routing_map.dtype != torch.bool or not probs.shape[-1] == routing_map.shape[-1] == num_experts:
            raise PlacementError(
                f"router {self._site.path} hands on weights {list(probs.shape)} and a map {list(routing_map.shape)} of "
                f"{routing_map.dtype}; expected a column for each of {num_experts} experts, and a map of bool. No plan "
                "can be executed in this configuration"
            )
        work = self._work = self._begin()
        if work.columns.has_replicas:
            _finish_gathering(self._experts)
        work.replicas.announce()
        self._dispatcher.expect(work.columns if work.counts_known else None)
        map_RC, probs_RC = work.columns.fill(routing_map, probs, work.planned_R)
        return self._preprocess(hidden_states, probs_RC, map_RC)

    def _run_experts(self, rows: Tensor, rows_per_slot: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        """See the `forward` of the experts module. [R, D], [S], [R]."""
        work, self._work = self._work, None
        assert work is not None, "the layer hands rows to its dispatcher first"
        # no weight is to stand in front of the rows, which are here or on their way; in cells without replicas too, so
        # that the order of cells is known
        replicas = work.replicas
        replicas.fetch()
        sizes = rows_per_slot.tolist()
        work.note(sum(sizes))
        num_home = self._experts.num_local_experts
        here = sum(sizes[:num_home])
        output, bias = self._run_home(rows[:here], rows_per_slot[:num_home], probs[:here])
        served = [sizes[num_home + slot] for slot in replicas.slots]
        computed, token = replicas.compute(self._run_replicas, rows[here:], probs[here:], served)
        if computed:
            output = torch.cat([output, *computed])
        return replicas.give_up(token, output), bias


def objection_to_layer(site: ChunkRouter) -> str | None:
    """Why a plan cannot be executed in a layer, or None."""
    block, dispatcher = site.block, site.block.token_dispatcher
    if any(getattr(type(block), name, None) is not getattr(MoELayer, name) for name in ("forward", "preprocess")):
        return f"it is a {type(block).__name__} with a forward of its own, so it is not known where it dispatches"
    if type(dispatcher) not in DISPATCHERS:
        backend = getattr(block.config, "moe_flex_dispatcher_backend", None)
        on = f" on {backend}" if isinstance(dispatcher, MoEFlexTokenDispatcher) else ""
        return (
            f"its dispatcher is a {type(dispatcher).__name__}{on}, which fills buffers of its own by expert; set "
            "moe_token_dispatcher_type to alltoall or allgather"
        )
    return _objection_to_settings(block.config, dispatcher) or objection_to_experts(site)


def _objection_to_settings(config: Any, dispatcher: Any) -> str | None:
    if dispatcher.tp_size > 1:
        return (
            f"expert_tensor_parallel_size is {dispatcher.tp_size}, and a replica is a whole expert; set it to 1 to "
            "execute plans"
        )
    for name, reason in REFUSED_SETTINGS.items():
        if getattr(config, name, None) not in (None, False):
            return f"{name} is set: {reason}; train without it to execute plans"
    return None


def _finish_gathering(experts: nn.Module) -> None:
    """Under overlap_param_gather a weight is stale until the hook of its module has run, and it is about to be sent."""
    for module in experts.modules():
        for hook in module._forward_pre_hooks.values():
            if getattr(hook, "__module__", None) == DDP_MODULE:
                hook(module, ())


def _restore(attributes: dict[str, Any], name: str, before: dict[str, Any]) -> None:
    if name in before:
        attributes[name] = before[name]
    else:
        del attributes[name]

"""One MoE layer while a plan is executed: its rows go where the plan says, by the code of `foreroute.ep`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from foreroute.adapters.megatron.plan_execution.experts import objection_to_experts, replica_runner
from foreroute.adapters.megatron.plan_execution.replicas import SeparateReplicas
from foreroute.core.passes import PassStack
from foreroute.ep.dispatch import Combine, Dispatch, DispatchHandle
from foreroute.ep.execution import work_of
from foreroute.errors import PlacementError

DISPATCHERS = (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)
DDP_MODULE = "megatron.core.distributed.distributed_data_parallel"
STEPS = ("preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess")
"""Methods of MoELayer, in the order in which it calls them behind its router."""
REFUSED_SETTINGS = {
    "moe_expert_capacity_factor": "it drops assignments that the plan has counted",
    "moe_router_padding_for_quantization": "it adds rows that no plan has counted",
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


class PlannedLayer:
    """Stands, on the instance, in the steps of a MoE layer from what its router hands on to its output.

    Args:
        site: the layer's router.
        number: its position among the routed layers of the model.
        homes: by that position, name -> the parameter of each home expert, in ascending order of its id.
        group: the expert-parallel ranks.
        passes: of the chunk that it is in.
    """

    def __init__(
        self,
        site: ChunkRouter,
        number: int,
        homes: Mapping[int, Mapping[str, Sequence[nn.Parameter]]],
        group: Any,
        passes: PassStack,
    ) -> None:
        self._site, self._number, self._home = site, number, homes[number]
        self._group, self._passes = group, passes
        self._block, self._experts = site.block, site.block.experts
        self._run_replicas = replica_runner(self._experts)
        self._fuses_gradients = bool(self._experts.config.gradient_accumulation_fusion)
        # E to 1, so that the larger of two stands for the expert with the smaller id; made where the model runs
        self._descending_E = torch.empty(0)
        self._shared: Any = self._block.shared_experts if self._block.shared_expert_overlap else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand there while the context is open, once."""
        with ExitStack() as stack:
            own = (self._preprocess, self._dispatch, self._compute, self._combine, self._postprocess)
            for name, stand_in in zip(STEPS, own, strict=True):
                stack.callback(_restore, self._block.__dict__, name, dict(self._block.__dict__))
                self._block.__dict__[name] = stand_in
            yield

    def finish_gathering(self) -> None:
        """Under overlap_param_gather a weight is stale until the hook of its module has run."""
        for module in self._experts.modules():
            for hook in module._forward_pre_hooks.values():
                if getattr(hook, "__module__", None) == DDP_MODULE:
                    hook(module, ())

    def _preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """[.., B, D], and [R, E] with a map of bool, to the rows [R, D] and their gate weights [R, K]."""
        num_experts, top_k = self._site.module.num_experts, self._site.module.topk
        if routing_map.dtype != torch.bool or not probs.shape[-1] == routing_map.shape[-1] == num_experts:
            raise PlacementError(
                f"router {self._site.path} hands on weights {list(probs.shape)} and a map {list(routing_map.shape)} of "
                f"{routing_map.dtype}; expected a column for each of {num_experts} experts, and a map of bool. No plan "
                "can be executed in this configuration"
            )
        work = work_of(self._passes, self._number, f"the layer of {self._site.path}")
        self._replicas = replicas = SeparateReplicas(
            work.cell, work.engine, self._home, work.moves, fuses_gradients=self._fuses_gradients
        )
        if replicas.hosted:
            self.finish_gathering()
        replicas.register()
        if len(self._descending_E) != num_experts:
            self._descending_E = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
        # ascending ids: the picks of a token are added up in the order in which Megatron adds them
        ids_RK = (routing_map * self._descending_E).topk(top_k, dim=1).indices
        rows = work.begin(routing_map.sum(0))
        self._handle = DispatchHandle.of(self._group, work.name, rows, ids_RK, None)
        self._shape = hidden_states.shape
        if self._shared is not None:
            self._shared.pre_forward_comm(hidden_states)
        return hidden_states.view(-1, self._shape[-1]), probs.gather(1, ids_RK)

    def _dispatch(self, hidden_RD: Tensor, gates_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in order of their expert here, and their gate weights."""
        rows, gates = Dispatch.apply(hidden_RD, gates_RK, self._handle)
        # no weight is to stand in front of the rows
        self._replicas.fetch()
        if self._shared is not None:
            self._shared.linear_fc1_forward_and_act(rows)
        return rows, gates.view(-1)

    def _compute(self, rows: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        """What home experts and replicas make of them, in the same order."""
        replicas, groups = self._replicas, self._handle.rows
        home_S, served_S = groups.home.sizes, groups.replicas.sizes
        parts = [sum(home_S), sum(served_S)]
        (rows, served), (gates, served_gates) = rows.split(parts), gates.split(parts)
        output, _ = self._experts(rows, torch.tensor(home_S), gates)
        return replicas.compute(output, self._run_replicas, served, served_gates, served_S), None

    def _combine(self, computed: Tensor) -> Tensor:
        """[R, D], added up over the picks of each row."""
        output: Tensor = Combine.apply(computed, self._handle)
        if self._shared is not None:
            self._shared.linear_fc2_forward(output)
            self._shared.post_forward_comm()
        # nodes of autograd lead from them to this layer
        del self._replicas, self._handle
        return output

    def _postprocess(self, output: Tensor, of_shared: Tensor | None) -> Tensor:
        """In the shape in which it came, with what shared experts give out."""
        output = output.view(self._shape)
        if self._shared is not None:
            of_shared = self._shared.get_output()
        return output if of_shared is None else output + of_shared


def objection_to_layer(site: ChunkRouter) -> str | None:
    """Why a plan cannot be executed in a layer, or None."""
    block, dispatcher = site.block, site.block.token_dispatcher
    if any(getattr(type(block), name, None) is not getattr(MoELayer, name) for name in ("forward", *STEPS)):
        return f"it is a {type(block).__name__} with a forward of its own, so it is not known where it dispatches"
    if type(dispatcher) not in DISPATCHERS:
        backend = getattr(block.config, "moe_flex_dispatcher_backend", None)
        on = f" on {backend}" if isinstance(dispatcher, MoEFlexTokenDispatcher) else ""
        return (
            f"its dispatcher is a {type(dispatcher).__name__}{on}, which sends rows in a way of its own, and a "
            "plan sends them by all-to-all; set moe_token_dispatcher_type to alltoall or allgather"
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


def _restore(attributes: dict[str, Any], name: str, before: dict[str, Any]) -> None:
    if name in before:
        attributes[name] = before[name]
    else:
        del attributes[name]

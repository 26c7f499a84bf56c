"""One MoE layer while a plan is executed: its rows go where the plan says, by the code of `foreroute.ep`.

N rows: tokens of this rank, or assignments on their way; K picks, D hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)
from torch import Tensor, nn

from foreroute.adapters.megatron.discover import ChunkRouter, objection_to_output, objection_to_settings
from foreroute.adapters.megatron.expert_parameters import objection_to_class
from foreroute.adapters.megatron.flex_kernels import (
    FlexHandle,
    is_flex,
    kernel_handle,
    objection_to_kernels,
)
from foreroute.adapters.megatron.separate_replicas import RunReplicas, SeparateReplicas, objection_to_experts
from foreroute.core.passes import PassStack
from foreroute.ep.dispatch import DispatchHandle
from foreroute.ep.execution import work_of
from foreroute.errors import PlanError

DISPATCHERS = (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher, MoEFlexTokenDispatcher)
DDP_MODULE = "megatron.core.distributed.distributed_data_parallel"
STEPS = ("preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess")
"""Methods of MoELayer, in the order in which it calls them behind its router."""
REFUSED_SETTINGS = {
    "moe_expert_capacity_factor": "drops assignments that the plan has counted",
    "moe_router_padding_for_quantization": "adds rows that no plan has counted",
    "fp8": "keeps scales per parameter, and replica slots are not parameters",
    "fp4": "keeps scales per parameter, and replica slots are not parameters",
    "moe_latent_size": "projects rows between the layer and its dispatcher",
    "moe_apply_probs_on_input": "has the experts module apply weights before its experts",
    "delay_wgrad_compute": "brings weight gradients after the bucket was reduced",
    "overlap_dispatch_backward_with_experts_wgrad": "may bring weight gradients after the bucket was reduced",
    "quant_recipe": "keeps scales per module that it names, and replica slots are in no module",
    "add_bias_linear": "has the experts module add biases of experts",
}
"""Settings of TransformerConfig, and why no plan is executed under them, with replicas or without."""


class PlannedLayer:
    """The steps of a MoE layer from the output of its router to its own output, replaced on the instance."""

    def __init__(
        self,
        site: ChunkRouter,
        number: int,  # its position among the routed layers of the model
        home: Mapping[str, Sequence[nn.Parameter]],  # name -> that of each home expert, in ascending order of its id
        run_replicas: RunReplicas,
        group: Any,
        passes: PassStack,  # of the chunk that it is in
    ) -> None:
        self._site, self._number, self._home = site, number, home
        self._group, self._passes = group, passes
        self._block, self._experts = site.block, site.block.experts
        self._run_replicas = run_replicas
        self._fuses_gradients = bool(self._experts.config.gradient_accumulation_fusion)
        self._descending_E = torch.empty(0)  # made where the model runs
        self._shared: Any = self._block.shared_experts if self._block.shared_expert_overlap else None

    def _preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """[.., B, D], and [N, E] with a map of bool, to the rows [N, D] and their gate weights [N, K]."""
        num_experts, top_k = self._site.module.num_experts, self._site.module.topk
        if objection := objection_to_output(self._site, probs, routing_map):
            raise PlanError(f"{objection}. No plan can be executed in this configuration")
        work = work_of(self._passes, self._number, f"the layer of {self._site.path}")
        self._replicas = replicas = SeparateReplicas(
            work.cell,
            work.cells.engine,
            self._home,
            num_replicas=work.num_replicas,
            fuses_gradients=self._fuses_gradients,
        )
        if replicas.on_any_rank:
            self.finish_gathering()
        replicas.register()
        if len(self._descending_E) != num_experts:
            self._descending_E = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
        # The map has lost the order of picks, and Megatron adds up the picks of a token in ascending order of their
        # ids. E to 1 in place of the ones of the map makes topk, whose result is in descending order, give them so.
        ids_NK = (routing_map * self._descending_E).topk(top_k, dim=1).indices
        rows, dispatcher = work.begin(routing_map.sum(0)), self._block.token_dispatcher
        self._handle: DispatchHandle | FlexHandle = (
            DispatchHandle(self._group, work.cell, rows, ids_NK)
            if rows.places is None
            else kernel_handle(dispatcher, rows, ids_NK)
        )
        self._shape = hidden_states.shape
        if self._shared is not None:
            self._shared.pre_forward_comm(hidden_states)
        return hidden_states.view(-1, self._shape[-1]), probs.gather(1, ids_NK)

    def _dispatch(self, hidden_ND: Tensor, gates_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows to their experts: rows in order of their expert here, and their gate weights."""
        rows, gates = self._handle.dispatch(hidden_ND, gates_NK)
        # on one communicator, what is launched first travels first: no row waits for a weight. Kernels of flex have
        # buffers of their own, and share links with weights
        self._replicas.fetch()
        if self._shared is not None:
            self._shared.linear_fc1_forward_and_act(rows)
        return rows, gates

    def _compute(self, rows: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        """Run home experts, then the replicas here, whose weights have travelled meanwhile."""
        home_sizes, replica_sizes = self._handle.rows.home.sizes, self._handle.rows.replicas.sizes
        parts = [sum(home_sizes), sum(replica_sizes)]
        (rows, at_replicas), (gates, gates_there) = rows.split(parts), gates.split(parts)
        output, _ = self._experts(rows, torch.tensor(home_sizes), gates)
        return self._replicas.compute(output, self._run_replicas, at_replicas, gates_there, replica_sizes), None

    def _combine(self, computed: Tensor) -> Tensor:
        """Return results to their tokens and add them up, [N, D]."""
        output = self._handle.combine(computed)
        if self._shared is not None:
            self._shared.linear_fc2_forward(output)
            self._shared.post_forward_comm()
        # nodes of autograd lead from them to this layer, and so would a circle
        del self._replicas, self._handle
        return output

    def _postprocess(self, output: Tensor, shared_output: Tensor | None) -> Tensor:
        """Give the output its shape back, and add that of shared experts."""
        output = output.view(self._shape)
        if self._shared is not None:
            shared_output = self._shared.get_output()
        return output if shared_output is None else output + shared_output

    @contextmanager
    def in_place(self) -> Iterator[None]:
        own = (self._preprocess, self._dispatch, self._compute, self._combine, self._postprocess)
        attributes = self._block.__dict__
        before = {name: attributes[name] for name in STEPS if name in attributes}
        attributes.update(zip(STEPS, own, strict=True))
        try:
            yield
        finally:
            for name in STEPS:
                del attributes[name]
            attributes.update(before)

    def finish_gathering(self) -> None:
        """Run the hooks of DistributedDataParallel: under overlap_param_gather, a weight is stale before."""
        for module in self._experts.modules():
            for hook in module._forward_pre_hooks.values():
                if getattr(hook, "__module__", None) == DDP_MODULE:
                    hook(module, ())


def objection_to_layer(site: ChunkRouter) -> str | None:
    """Say why a plan cannot be executed in a layer, or None."""
    block, dispatcher = site.block, site.block.token_dispatcher
    if objection := objection_to_class(block, ("forward", *STEPS)):
        return objection
    if type(dispatcher) not in DISPATCHERS:
        return (
            f"its dispatcher is a {type(dispatcher).__name__}, which sends rows in a way of its own; set "
            "moe_token_dispatcher_type to alltoall, allgather or flex"
        )
    if dispatcher.tp_size > 1:
        return (
            f"expert_tensor_parallel_size is {dispatcher.tp_size}, and a replica is a whole expert; set it to 1 to "
            "execute plans"
        )
    if is_flex(dispatcher) and (objection := objection_to_kernels(dispatcher)):
        return objection
    if setting := objection_to_settings(block.config, REFUSED_SETTINGS):
        return f"{setting}; train without it to execute plans"
    return objection_to_experts(block.experts)

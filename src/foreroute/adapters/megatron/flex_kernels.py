"""The kernels of Megatron-Core's flex dispatcher under a plan: DeepEP and HybridEP, which are told places for experts.

Both send a token once to a rank, and add up what returns. How many rows a rank receives is known, and is their budget:
no row is dropped, and the host does not wait. DeepEP refuses budgets between nodes, and waits there as it does without
a plan.

N tokens, K picks, D hidden size, G ranks, P places of a rank, R received tokens, A rows computed here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from torch import Tensor
from torch.nn import functional

from foreroute.ep.dispatch import CellRows

HYBRID_EP_ALIGNMENT = 4
"""Of the places, and of the tokens, of ranks that NVLink joins: HybridEP refuses other numbers."""
HYBRID_EP_CHUNK = 64
"""Tokens that its kernels take at once."""


def is_flex(dispatcher: Any) -> bool:
    return type(dispatcher) is token_dispatcher.MoEFlexTokenDispatcher


def objection_to_kernels(dispatcher: Any) -> str | None:
    """Say why a flex dispatcher cannot be told places, or None."""
    backend = dispatcher.config.moe_flex_dispatcher_backend
    if type(dispatcher._comm_manager) in HANDLES:
        return None
    return f"its flex dispatcher sends by {backend}, which was not tried with places of a plan; take deepep or hybridep"


def places_of_rank(dispatcher: Any, num_home: int, num_slots: int) -> int:
    """Return P, for all layers, cells and passes of a plan: buffers are made for it."""
    align = HYBRID_EP_ALIGNMENT if HANDLES[type(dispatcher._comm_manager)] is HybridEPHandle and num_slots else 1
    return -(-(num_home + num_slots) // align) * align


def kernel_handle(dispatcher: Any, rows: CellRows, ids_NK: Tensor) -> FlexHandle:
    """Return where the rows of one call go, given the expert of each pick, int64."""
    manager = dispatcher._comm_manager
    return HANDLES[type(manager)](manager, rows, ids_NK)


class FlexHandle:
    """Where the rows of one call go, token by token, as `DispatchHandle`."""

    def __init__(self, manager: Any, rows: CellRows, ids_NK: Tensor) -> None:
        assert rows.places is not None, "executions of flex dispatchers have places"
        self.rows, self._places, self._num_rows = rows, rows.places, sum(rows.receive_G)
        # it keeps tensors of its call, so every call has one
        self._manager = copy.copy(manager)
        self._num_places = self._places.num_local * len(rows.receive_G)
        order_A = ids_NK.reshape(-1).argsort(stable=True)
        place_A = torch.empty_like(order_A).scatter_(0, order_A, self._places.place_A)
        self._place_NK = place_A.view_as(ids_NK)
        # a group without a row is given one of zeros where no home expert, or no replica, has any
        has_replica_rows = self._num_rows > self._places.num_home_rows
        self._padding = int(not self._places.num_home_rows), int(bool(rows.replicas.sizes) and not has_replica_rows)

    def dispatch(self, hidden_ND: Tensor, gates_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens: the rows computed here [A, D] in order of group, and their gate weights [A]."""
        rows, gates = self._send(hidden_ND.contiguous(), gates_NK.float())
        if gates_NK.dtype == torch.float64:  # as Megatron does; kernels know float32 alone
            gates = gates.double()
        if any(self._padding):
            rows, gates = functional.pad(rows, (0, 0, *self._padding)), functional.pad(gates, self._padding)
        return rows, gates

    def combine(self, computed_AD: Tensor) -> Tensor:
        """Return results to their tokens and add them up, [N, D]."""
        return self._return(
            computed_AD.narrow(0, self._padding[0], self._num_rows) if any(self._padding) else computed_AD
        )

    def _send(self, hidden_ND: Tensor, gates_NK: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _return(self, computed_AD: Tensor) -> Tensor:
        raise NotImplementedError


class DeepEPHandle(FlexHandle):
    """Rows on DeepEP, which sends indices along and leaves their order to the receiver."""

    def _send(self, hidden_ND: Tensor, gates_NK: Tensor) -> tuple[Tensor, Tensor]:
        # a token comes once, whatever it picks here
        top_k = gates_NK.shape[1]
        most = sum(
            min(rows, sent // top_k) for rows, sent in zip(self.rows.receive_G, self._places.sent_G, strict=True)
        )
        received_RD, place_RK, gates_RK, _, self._kernel_handle = BudgetedDispatch.apply(
            hidden_ND, self._place_NK, gates_NK, self._num_places, self._manager.group, max(most, 1)
        )
        self._num_received = len(received_RD)
        # no pick, -1, comes behind all places
        order_A = place_RK.remainder(self._places.num_local + 1).view(-1).argsort(stable=True)[: self._num_rows]
        self._token_A = order_A // top_k
        return received_RD.index_select(0, self._token_A), gates_RK.view(-1).index_select(0, order_A)

    def _return(self, computed_AD: Tensor) -> Tensor:
        sums_RD = computed_AD.new_zeros(self._num_received, computed_AD.shape[1])
        sums_RD = sums_RD.index_add(0, self._token_A, computed_AD)
        output: Tensor = fused_a2a.FusedCombine.apply(sums_RD, self._manager.group, self._kernel_handle)[0]
        return output


class HybridEPHandle(FlexHandle):
    """Rows on HybridEP, which takes maps of places and gives rows in their order."""

    def _send(self, hidden_ND: Tensor, gates_NK: Tensor) -> tuple[Tensor, Tensor]:
        manager, self._num_tokens = self._manager, len(hidden_ND)
        padded, sent_G = self._num_tokens, self._places.sent_G
        if min(sent_G) < max(sent_G) or padded % HYBRID_EP_ALIGNMENT:
            # Ranks must have equally many. Megatron, where it is told to pad, asks all ranks, and waits for them.
            padded = max(sent_G) // gates_NK.shape[1]
            padded += -padded % HYBRID_EP_CHUNK
            hidden_ND = functional.pad(hidden_ND, (0, 0, 0, padded - self._num_tokens))
        shape = padded, self._num_places
        manager.num_local_experts = self._places.num_local
        manager.routing_map = torch.zeros(shape, dtype=torch.bool, device=hidden_ND.device)
        manager.routing_map.scatter_(1, self._place_NK, True)
        manager.token_probs = gates_NK.new_zeros(shape).scatter(1, self._place_NK, gates_NK)
        manager.num_permuted_tokens = self._num_rows
        rows = manager.dispatch(hidden_ND)
        manager.num_permuted_tokens = self._num_rows  # releases before 0.19 put a tensor there, which backward reads
        return rows, manager.dispatched_probs

    def _return(self, computed_AD: Tensor) -> Tensor:
        output: Tensor = self._manager.combine(computed_AD)
        return output if len(output) == self._num_tokens else output[: self._num_tokens]


class BudgetedDispatch(fused_a2a.FusedDispatch):
    """Megatron's dispatch by DeepEP, with room for as many received tokens as the caller says, so that nobody waits."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, place_NK: Tensor, gates_NK: Tensor, num_places: int, group: Any, most_received: int
    ) -> tuple[Tensor, Tensor, Tensor, None, Any]:
        buffer = fused_a2a.get_buffer(group, fused_a2a.get_hidden_bytes(x_ND))
        to_rank, to_rdma_rank, to_place, is_in_rank, _ = buffer.get_dispatch_layout(place_NK, num_places)
        received_RD, place_RK, gates_RK, _, handle, _ = buffer.dispatch(
            x_ND,
            topk_idx=place_NK,
            topk_weights=gates_NK,
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=to_place,
            num_worst_tokens=most_received if buffer.runtime.get_num_rdma_ranks() == 1 else 0,
        )
        ctx.group, ctx.handle = group, handle
        ctx.async_finish = ctx.allocate_on_comm_stream = False
        return received_RD, place_RK, gates_RK, None, handle


HANDLES: dict[type, type[FlexHandle]] = {
    token_dispatcher._DeepepManager: DeepEPHandle,
    token_dispatcher._HybridEPManager: HybridEPHandle,
}

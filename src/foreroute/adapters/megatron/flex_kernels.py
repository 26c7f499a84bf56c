"""The kernels of Megatron-Core's flex dispatcher under a plan: DeepEP and HybridEP, which are told places for experts.

Both send a token once to a rank that has picks of it, and add up what returns. The rows that a rank receives are known,
and are their budget: none is dropped, and the host does not wait. Between nodes DeepEP refuses budgets, and waits.

N tokens, K picks, D hidden size, P places of a rank, R received tokens, A rows computed here.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from torch import Tensor
from torch.nn import functional

from foreroute.ep.dispatch import CellRows

HYBRID_EP_MULTIPLE = 4
"""HybridEP refuses numbers of places, and of tokens, of which the ranks that NVLink joins have no multiple of this."""
HYBRID_EP_CHUNK = 64
"""Tokens that its kernels take at once."""


def is_flex(dispatcher: Any) -> bool:
    return type(dispatcher) is token_dispatcher.MoEFlexTokenDispatcher


def objection_to_kernels(dispatcher: Any) -> str | None:
    """Say why a flex dispatcher cannot be told places, or None."""
    if type(dispatcher._comm_manager) in HANDLES:
        return None
    backend = dispatcher.config.moe_flex_dispatcher_backend
    return f"its flex dispatcher sends by {backend}, which was never told the places of a plan; take deepep or hybridep"


def places_of_rank(dispatcher: Any, num_home: int, num_slots: int) -> int:
    """Return P, of all layers, cells and passes of a plan: HybridEP makes its buffer for it."""
    multiple = HYBRID_EP_MULTIPLE if num_slots and HANDLES[type(dispatcher._comm_manager)] is HybridEPHandle else 1
    return -(-(num_home + num_slots) // multiple) * multiple


def kernel_handle(dispatcher: Any, rows: CellRows, ids_NK: Tensor) -> FlexHandle:
    """Return where the rows of one call go, given the expert of each pick, int64."""
    manager = dispatcher._comm_manager
    return HANDLES[type(manager)](manager, rows, ids_NK)


class FlexHandle(ABC):
    """Destinations of the rows of one call, token by token, as `DispatchHandle`."""

    widens_gates = False
    """Flag that Megatron gives experts gates of the router's float64 again."""

    def __init__(self, manager: Any, rows: CellRows, ids_NK: Tensor) -> None:
        assert rows.places is not None, "executions on flex dispatchers have places"
        self.rows, self._places, self._num_rows = rows, rows.places, sum(rows.receive_G)
        self._num_places = self._places.num_local * len(rows.receive_G)
        self._manager = copy.copy(manager)  # it keeps tensors of its call
        order_A = ids_NK.reshape(-1).argsort(stable=True)
        place_A = torch.empty_like(order_A).scatter_(0, order_A, self._places.place_A)
        self._place_NK = place_A.view_as(ids_NK)
        # where home experts here, or replicas, get no row at all, the sizes of their groups have one of zeros
        num_home = self._places.num_home_rows
        self._zeros = int(not num_home), int(bool(rows.replicas.sizes) and num_home == self._num_rows)

    def dispatch(self, hidden_ND: Tensor, gates_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens: the rows computed here [A, D] in order of group, and their gate weights [A]."""
        rows, gates = self._send(hidden_ND.contiguous(), gates_NK.float())  # kernels take float32 alone
        if self.widens_gates:
            gates = gates.to(gates_NK.dtype)
        if any(self._zeros):
            rows, gates = functional.pad(rows, (0, 0, *self._zeros)), functional.pad(gates, self._zeros)
        return rows, gates

    def combine(self, computed_AD: Tensor) -> Tensor:
        """Return results to their tokens and add them up, [N, D]."""
        if any(self._zeros):
            computed_AD = computed_AD.narrow(0, self._zeros[0], self._num_rows)
        return self._return(computed_AD)

    @abstractmethod
    def _send(self, hidden_ND: Tensor, gates_NK: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _return(self, computed_AD: Tensor) -> Tensor: ...


class DeepEPHandle(FlexHandle):
    """Rows on DeepEP, which sends picks along and leaves it to the receiver to sort them."""

    widens_gates = True

    def _send(self, hidden_ND: Tensor, gates_NK: Tensor) -> tuple[Tensor, Tensor]:
        top_k, of_ranks = gates_NK.shape[1], zip(self.rows.receive_G, self._places.sent_G, strict=True)
        # a token comes once, whatever it picks here
        most_received = sum(min(rows, sent // top_k) for rows, sent in of_ranks)
        received_RD, place_RK, gates_RK, _, self._way_back = BudgetedDispatch.apply(
            hidden_ND, self._place_NK, gates_NK, self._num_places, self._manager.group, max(most_received, 1)
        )
        self._num_received = len(received_RD)
        # what is no pick here, -1, comes behind all places
        order_A = place_RK.remainder(self._places.num_local + 1).view(-1).argsort(stable=True)[: self._num_rows]
        self._token_A = order_A // top_k
        return received_RD.index_select(0, self._token_A), gates_RK.view(-1).index_select(0, order_A)

    def _return(self, computed_AD: Tensor) -> Tensor:
        sums_RD = computed_AD.new_zeros(self._num_received, computed_AD.shape[1])
        sums_RD = sums_RD.index_add(0, self._token_A, computed_AD)
        output: Tensor = fused_a2a.FusedCombine.apply(sums_RD, self._manager.group, self._way_back)[0]
        return output


class HybridEPHandle(FlexHandle):
    """Rows on HybridEP, which takes maps of places and gives rows in their order."""

    def _send(self, hidden_ND: Tensor, gates_NK: Tensor) -> tuple[Tensor, Tensor]:
        manager, sent_G = self._manager, self._places.sent_G
        self._num_tokens = padded = len(hidden_ND)
        if min(sent_G) < max(sent_G) or padded % HYBRID_EP_MULTIPLE:
            # Ranks must have equally many. Megatron, where it is told to pad, asks all ranks and waits for them.
            padded = -(-max(sent_G) // gates_NK.shape[1] // HYBRID_EP_CHUNK) * HYBRID_EP_CHUNK
            hidden_ND = functional.pad(hidden_ND, (0, 0, 0, padded - self._num_tokens))
        shape = padded, self._num_places
        manager.num_local_experts, manager.num_permuted_tokens = self._places.num_local, self._num_rows
        manager.routing_map = torch.zeros(shape, dtype=torch.bool, device=hidden_ND.device)
        manager.routing_map.scatter_(1, self._place_NK, True)
        manager.token_probs = gates_NK.new_zeros(shape).scatter(1, self._place_NK, gates_NK)
        # of a call that raised, in releases that pad
        manager._padded_num_tokens = manager._original_num_tokens = None
        rows = manager.dispatch(hidden_ND)
        # releases before 0.19 put a tensor there, which backward would read
        manager.num_permuted_tokens = self._num_rows
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
        received_RD, place_RK, gates_RK, _, way_back, _ = buffer.dispatch(
            x_ND,
            topk_idx=place_NK,
            topk_weights=gates_NK,
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=to_place,
            num_worst_tokens=most_received if buffer.runtime.get_num_rdma_ranks() == 1 else 0,
        )
        # for the inherited backward
        ctx.group, ctx.handle = group, way_back
        ctx.async_finish = ctx.allocate_on_comm_stream = False
        return received_RD, place_RK, gates_RK, None, way_back


HANDLES: dict[type, type[FlexHandle]] = {
    token_dispatcher._DeepepManager: DeepEPHandle,
    token_dispatcher._HybridEPManager: HybridEPHandle,
}

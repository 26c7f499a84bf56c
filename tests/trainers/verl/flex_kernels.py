"""DeepEP's and HybridEP's buffers by gloo, for Megatron's flex dispatcher. Importing this puts them in place.

They refuse what the kernels refuse, fill what those leave undefined with NaN, and count in `SEEN`: waits of the host,
rows that a budget has no room for, and rows that travel. Megatron's own functions of autograd run on them.
"""

import importlib
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

SEEN = Counter()
ALIGNMENT = 16
"""Bytes of which a row of DeepEP's has a multiple, and elements of one of HybridEP's."""


def exchange(rows, sizes_G, received_G, group):
    got = rows.new_empty(sum(received_G), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), received_G, sizes_G, group=group)
    return got


class Way:
    """Tokens that are sent once to each rank that has picks of them, [G, N] bool, and the way back."""

    def __init__(self, to_GN, group):
        rank_S, self.token_S = to_GN.nonzero().T
        sizes_G = torch.bincount(rank_S, minlength=group.size())
        received_G = torch.empty_like(sizes_G)
        dist.all_to_all_single(received_G, sizes_G, group=group)
        self.rank_S, self.num_tokens, self.group = rank_S, to_GN.shape[1], group
        self.sizes_G, self.received_G = sizes_G.tolist(), received_G.tolist()

    def send(self, rows):
        return self.send_sorted(rows[self.token_S])

    def send_sorted(self, rows):
        return exchange(rows, self.sizes_G, self.received_G, self.group)

    def bring(self, rows):
        """As they were sent."""
        return exchange(rows, self.received_G, self.sizes_G, self.group)

    def bring_back(self, rows):
        back = self.bring(rows)
        return back.new_zeros(self.num_tokens, back.shape[1]).index_add(0, self.token_S, back)


def filled_up(rows, size, fill):
    return torch.cat([rows, rows.new_full((size - len(rows), *rows.shape[1:]), fill)])


def in_float32(weights):
    """What kernels take. Where tests have `Tensor.float` let float64 be, Megatron could not round."""
    assert weights.dtype == torch.float32 or hasattr(torch.Tensor.float, "stays")
    return weights.to(torch.float32)


kernel = _disable_current_modes()
"""Of a method: it is no operators of torch, to whoever counts those."""


class Buffer:
    """DeepEP's, of one node."""

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.runtime = SimpleNamespace(get_num_rdma_ranks=lambda: 1)

    @staticmethod
    def get_dispatch_config(num_ranks):
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda *_: 1, get_rdma_buffer_size_hint=lambda *_: 0)

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(num_sms):
        assert num_sms % 2 == 0

    @kernel
    def get_dispatch_layout(self, topk_idx, num_experts, **_):
        assert topk_idx.ndim == 2, topk_idx.shape
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == torch.int64
        assert num_experts % self.group.size() == 0, f"{num_experts} experts on {self.group.size()} ranks"
        assert bool((topk_idx < num_experts).all())
        rank_NK = topk_idx.div(num_experts // self.group.size(), rounding_mode="floor")
        to_NG = (rank_NK[..., None] == torch.arange(self.group.size())).any(1)
        to_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return to_NG.sum(0).int(), None, to_expert, to_NG, None

    @kernel
    def dispatch(
        self,
        x,
        handle=None,
        topk_idx=None,
        topk_weights=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        num_worst_tokens=0,
        **_,
    ):
        assert x.is_contiguous()
        assert x.shape[1] * x.element_size() % ALIGNMENT == 0
        if handle is not None:
            way, num_rows = handle
            return filled_up(way.send(x), num_rows, torch.nan), None, None, None, None, Event()
        topk_weights = in_float32(topk_weights)
        assert topk_weights.is_contiguous()
        assert topk_weights.shape == topk_idx.shape
        num_local = len(num_tokens_per_expert) // self.group.size()
        way = Way(is_token_in_rank.T, self.group)
        got, num_rows = way.send(x), sum(way.received_G)
        SEEN["rows"] += len(way.token_S)
        here_SK = topk_idx[way.token_S] - way.rank_S[:, None] * num_local
        is_there_SK = (here_SK >= 0) & (here_SK < num_local)
        indices = way.send_sorted(here_SK.masked_fill(~is_there_SK, -1))
        weights = way.send_sorted(topk_weights[way.token_S].masked_fill(~is_there_SK, 0))
        counts = torch.bincount(indices[indices >= 0], minlength=num_local).tolist()
        if num_worst_tokens:
            SEEN["over budget"] += max(num_rows - num_worst_tokens, 0)
            assert num_rows <= num_worst_tokens, f"{num_rows} tokens came, and {num_worst_tokens} have room"
            num_rows, counts = num_worst_tokens, []
        else:
            SEEN["waits"] += 1
        full = filled_up(got, num_rows, torch.nan), filled_up(indices, num_rows, -1)
        return *full, filled_up(weights, num_rows, torch.nan), counts, (way, num_rows), Event()

    @kernel
    def combine(self, x, handle, topk_weights=None, **_):
        way, num_rows = handle
        assert x.is_contiguous()
        assert len(x) == num_rows
        came = sum(way.received_G)
        weights = None if topk_weights is None else way.bring_back(topk_weights[:came])
        return way.bring_back(x[:came]), weights, Event()


class HybridEPBuffer:
    """HybridEP's, whose ranks are one domain of NVLink."""

    def __init__(self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False, **_):
        self.group = group
        self.require_valid(hidden_dim, num_local_experts)

    def require_valid(self, hidden_dim, num_local):
        assert hidden_dim % ALIGNMENT == 0
        assert num_local * self.group.size() % 4 == 0, f"{num_local} experts on each of {self.group.size()} ranks"

    @kernel
    def dispatch_with_permute(
        self,
        *,
        hidden,
        routing_map=None,
        probs=None,
        num_of_experts_per_rank=None,
        num_permuted_tokens=None,
        handle=None,
        non_blocking=False,
        **_,
    ):
        assert hidden.is_contiguous()
        if handle is not None:
            way, row_C, _, _, num_rows, _ = handle
            if not isinstance(num_permuted_tokens, int):  # on the device
                SEEN["waits"] += 1
            assert int(num_permuted_tokens) == num_rows
            return filled_up(way.send(hidden)[row_C], num_rows, torch.nan), None, None, None, None
        self.require_valid(hidden.shape[1], num_of_experts_per_rank)
        assert routing_map.dtype == torch.bool
        assert routing_map.is_contiguous()
        probs = in_float32(probs)
        assert probs.is_contiguous()
        assert len(routing_map) == len(hidden)
        assert routing_map.shape[1] == num_of_experts_per_rank * self.group.size(), routing_map.shape
        sizes = [None] * self.group.size()
        dist.all_gather_object(sizes, len(hidden), group=self.group)
        assert len(set(sizes)) == 1, f"ranks have {sizes} tokens"
        assert sizes[0] % 64 * self.group.size() % 4 == 0, f"{sizes[0]} tokens"
        map_NGP, probs_NGP = (each.reshape(len(hidden), self.group.size(), -1) for each in (routing_map, probs))
        way = Way(map_NGP.any(-1).T, self.group)
        SEEN["rows"] += len(way.token_S)
        got = way.send(hidden)
        map_RP = way.send_sorted(map_NGP[way.token_S, way.rank_S].to(torch.uint8)).bool()
        probs_RP = way.send_sorted(probs_NGP[way.token_S, way.rank_S])
        expert_C, row_C = map_RP.T.nonzero().T
        num_rows = len(row_C)
        if non_blocking:
            assert isinstance(num_permuted_tokens, int)
            SEEN["over budget"] += max(num_rows - num_permuted_tokens, 0)
            num_rows = num_permuted_tokens
            expert_C, row_C = expert_C[:num_rows], row_C[:num_rows]  # those behind are dropped
        else:
            SEEN["waits"] += 1
        overflow = torch.tensor([int(map_RP.sum()) > num_rows], dtype=torch.int32)
        handle = way, row_C, expert_C, num_of_experts_per_rank, num_rows, overflow
        permuted = filled_up(got[row_C], num_rows, torch.nan), filled_up(probs_RP[row_C, expert_C], num_rows, torch.nan)
        return *permuted, None, map_RP.sum(0), handle

    @kernel
    def combine_with_unpermute(self, *, hidden, probs=None, handle, **_):
        way, row_C, expert_C, num_local, num_rows, _ = handle
        assert hidden.is_contiguous()
        assert len(hidden) == num_rows
        came = sum(way.received_G)
        rows = hidden.new_zeros(came, hidden.shape[1]).index_add(0, row_C, hidden[: len(row_C)])
        if probs is None:
            return way.bring_back(rows), None
        probs = in_float32(probs)
        probs_RP = probs.new_zeros(came, num_local)
        probs_RP[row_C, expert_C] = probs[: len(row_C)]
        probs_NGP = probs.new_zeros(way.num_tokens, self.group.size(), num_local)
        probs_NGP[way.token_S, way.rank_S] = way.bring(probs_RP)
        return way.bring_back(rows), probs_NGP.flatten(1)


def Event(*_):
    """Of a stream."""
    return SimpleNamespace(current_stream_wait=lambda: None)


make_manager, zeros = token_dispatcher._HybridEPManager.__init__, torch.zeros


def make_on_cpu(manager, *args, **named):
    """Newer releases put a flag on the GPU."""
    with mock.patch.object(torch, "zeros", lambda *sizes, device=None, **more: zeros(*sizes, **more)):
        make_manager(manager, *args, **named)


token_dispatcher._HybridEPManager.__init__ = make_on_cpu
library = ModuleType("deep_ep")
library.Buffer, library.HybridEPBuffer, library.utils = Buffer, HybridEPBuffer, ModuleType("deep_ep.utils")
library.utils.EventHandle = library.utils.EventOverlap = Event
sys.modules |= {"deep_ep": library, "deep_ep.utils": library.utils}
importlib.reload(fused_a2a)
for name in ("fused_dispatch", "fused_combine", "hybrid_ep_dispatch", "hybrid_ep_combine", "set_deepep_num_sms"):
    setattr(token_dispatcher, name, getattr(fused_a2a, name))

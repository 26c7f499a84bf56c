"""What the kernels of DeepEP and HybridEP give Megatron's flex dispatcher, by gloo. Importing this puts them in place.

Both send a row once to every rank that has experts of it, and add up what comes back. Received rows have a map bool
[R, P] of the P experts here and their weights [R, P]; DeepEP has it as indices, and HybridEP has the rows permuted.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import permute, unpermute


def send(rows, map_NE, probs_NE, group):
    map_NGP, probs_NGP = (each.reshape(len(rows), group.size(), -1) for each in (map_NE, probs_NE))
    rank_S, row_S = map_NGP.any(-1).T.nonzero().T
    sizes_G = torch.bincount(rank_S, minlength=group.size())
    received_G = torch.empty_like(sizes_G)
    dist.all_to_all_single(received_G, sizes_G, group=group)
    splits = received_G.tolist(), sizes_G.tolist()
    sent = rows[row_S], map_NGP[row_S, rank_S].to(torch.uint8), (probs_NGP * map_NGP)[row_S, rank_S]
    received, map_RP, probs_RP = (all_to_all(group, each, *splits) for each in sent)
    return received, map_RP.bool(), probs_RP, (group, row_S, len(rows), *splits)


def send_back(rows, way):
    group, row_S, num_rows, received, sizes = way
    back = all_to_all(group, rows, sizes, received)
    return back.new_zeros(num_rows, back.shape[1]).index_add(0, row_S, back)


def fused_dispatch(x, token_indices, token_probs, num_experts, group, **_):
    wide = token_probs.new_zeros(len(x), num_experts)
    map_NE = wide.scatter(1, token_indices, 1).bool()
    x, map_RP, probs_RP, way = send(x, map_NE, wide.scatter(1, token_indices, token_probs), group)
    is_here_RK, indices_RK = map_RP.to(torch.uint8).topk(min(token_indices.shape[1], map_RP.shape[1]))
    probs_RK = probs_RP.gather(1, indices_RK)
    return x, indices_RK.masked_fill(is_here_RK == 0, -1), probs_RK, map_RP.sum(0), way


def fused_combine(x, group, handle, **_):
    return send_back(x, handle), None


def hybrid_ep_dispatch(x, routing_map, probs, group, num_local_experts, **_):
    x, map_RP, probs_RP, way = send(x, routing_map, probs, group)
    permuted, probs_C, order_C = permute(x, map_RP, probs=probs_RP, num_out_tokens=int(map_RP.sum()))
    return permuted, probs_C, None, map_RP.sum(0), (order_C, x.shape, map_RP, way)


def hybrid_ep_combine(x, handle, **_):
    order_C, shape, map_RP, way = handle
    return send_back(unpermute(x, order_C, restore_shape=shape, routing_map=map_RP), way)


token_dispatcher.set_deepep_num_sms = lambda num_sms: None
for kernel in (fused_dispatch, fused_combine, hybrid_ep_dispatch, hybrid_ep_combine):
    setattr(token_dispatcher, kernel.__name__, kernel)

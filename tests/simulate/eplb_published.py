"""EPLB in the form in which it is published: torch tensors and Python loops over every layer, group and pack.

Written anew from the algorithm of github.com/deepseek-ai/EPLB, with the same steps, tensor types and data structures,
so that `foreroute.simulate.eplb` has something to be equal to and to be timed against.
"""

from __future__ import annotations

import torch


def published_placement(
    weight_LE: torch.Tensor, num_copies: int, num_groups: int, num_nodes: int, num_ranks: int
) -> torch.Tensor:
    """int64 [L, num_copies], the logical expert in every physical slot, rank by rank."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    weight_LE = weight_LE.float()
    num_layers, num_experts = weight_LE.shape
    group_size, node_groups = num_experts // num_groups, num_groups // num_nodes
    node_of_group, place_of_group = _pack(weight_LE.unflatten(-1, (num_groups, group_size)).sum(-1), num_nodes)
    start = (node_of_group * node_groups + place_of_group) * group_size
    order = (start.unsqueeze(-1) + torch.arange(group_size)).flatten(-2)
    expert_at = _inverse(order)
    per_node = num_experts // num_nodes
    local = weight_LE.gather(-1, expert_at).view(-1, per_node)
    copied, copies = _replicate(local, num_copies // num_nodes)
    rank, place = _pack((local / copies).gather(-1, copied), num_ranks // num_nodes)
    slot = rank * (num_copies // num_ranks) + place
    in_slots = copied.gather(-1, _inverse(slot)).view(num_layers, num_nodes, -1)
    first = torch.arange(0, num_experts, per_node).view(1, -1, 1)
    return expert_at.gather(-1, (in_slots + first).flatten(-2))


def _pack(weight_LI: torch.Tensor, num_packs: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_layers, num_items = weight_LI.shape
    room = num_items // num_packs
    if room == 1:
        every = torch.arange(num_items).expand(weight_LI.shape)
        return every, torch.zeros_like(every)
    heaviest = weight_LI.sort(dim=-1, descending=True, stable=True).indices
    pack_LI, place_LI = torch.zeros_like(heaviest), torch.zeros_like(heaviest)
    for layer in range(num_layers):
        sums, held = [torch.zeros(())] * num_packs, [0] * num_packs
        for item in heaviest[layer]:
            pack = min((p for p in range(num_packs) if held[p] < room), key=sums.__getitem__)
            pack_LI[layer, item], place_LI[layer, item] = pack, held[pack]
            sums[pack] = sums[pack] + weight_LI[layer, item]
            held[pack] += 1
    return pack_LI, place_LI


def _replicate(weight_LE: torch.Tensor, num_copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_layers, num_experts = weight_LE.shape
    copied = torch.arange(num_copies).repeat(num_layers, 1)
    copies = torch.ones(num_layers, num_experts, dtype=torch.int64)
    layers = torch.arange(num_layers)
    for copy in range(num_experts, num_copies):
        hottest = (weight_LE / copies).max(dim=-1).indices
        copied[:, copy] = hottest
        copies[layers, hottest] += 1
    return copied, copies


def _inverse(permutation: torch.Tensor) -> torch.Tensor:
    places = torch.arange(permutation.shape[1]).expand(permutation.shape)
    return torch.empty_like(permutation).scatter_(1, permutation, places)

"""Recordings of a Megatron-Core model, put together over the ranks that share its rows and its layers.

Routes go from rank to rank as tensors, as narrow as they were recorded; only names of layers go as objects.

Letters: L layers, of a rank or of the model, R rows that routers of this rank see, C rows that the model is handed on
it, N packed rows, K picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.megatron.forward_args import Call, Share
from foreroute.ep.transfer.peers import gather_objects
from foreroute.errors import ReplayError
from foreroute.layout import Layout, collect
from foreroute.replay import ForwardRows, RecordedPass
from foreroute.trace import RoutedLayer, RoutingSpec


def rows_over_ranks(
    passes: list[list[RecordedPass]],
    spec: RoutingSpec,
    chunk_layers: Sequence[tuple[RoutedLayer, ...]],
    share: Share,
    groups: Any,
) -> list[ForwardRows]:
    """Put all rows and layers of every micro-batch together, on every rank. A collective of the model's ranks."""
    micro_batches = list(zip(*passes, strict=True))
    calls: list[Call] = [of_chunks[0].args for of_chunks in micro_batches]
    here = [layer for layers in chunk_layers for layer in layers]
    asks_values = any(each.values_LR is not None for of_chunk in passes for each in of_chunk)
    has_tokens = [call.input_ids is not None for call in calls]
    stages = gather_objects((here, asks_values, has_tokens), groups.pp, "recording")
    # every stage sends as many layers as the one with most, of which its own come first
    most = max(len(layers) for layers, *_ in stages)
    at = {layer: i * most + j for i, (layers, *_) in enumerate(stages) for j, layer in enumerate(layers)}
    order_L = torch.tensor([at[layer] for layer in spec.layers])

    def collect_rows(of_chunks: list[Tensor | None], nothing: Tensor, layout: Layout) -> NDArray[Any]:
        given = [each for each in of_chunks if each is not None]
        missing = nothing[None].expand(most - sum(map(len, given)), *nothing.shape)
        of_stages = _gather(torch.cat([*given, missing]), groups.pp).flatten(0, 1)
        rows = of_stages.index_select(0, order_L.to(of_stages.device)).transpose(0, 1)
        of_ranks = _gather(_gather(rows, share.sp_group), share.cp_group)
        return collect(
            (share.of_routers(layout, c, s).rows(), part)
            for c, of_sequence in enumerate(of_ranks.cpu().numpy())
            for s, part in enumerate(of_sequence)
        )

    recorded = []
    for number, (call, of_chunks) in enumerate(zip(calls, micro_batches, strict=True)):
        with_tokens = [stage for stage, (_, _, has) in enumerate(stages) if has[number]]
        if not with_tokens:
            raise ReplayError("no pipeline stage was given the tokens of a micro-batch, so that no trace can be made")
        lengths_S, layout, width = call.sequences()
        narrow = torch.uint8 if spec.id_dtype.itemsize == 1 else torch.int16  # torch sends no uint16
        ids = [None if each.ids_LRK is None else each.ids_LRK.view(narrow) for each in of_chunks]
        nothing = torch.zeros(call.num_router_rows, spec.top_k, dtype=narrow, device=call.device)
        ids_NLK, values_NL = collect_rows(ids, nothing, layout).view(spec.id_dtype), None
        if any(asked for _, asked, _ in stages):
            nothing = torch.zeros(call.num_router_rows, device=call.device)
            values_NL = collect_rows([each.values_LR for each in of_chunks], nothing, layout)
        tokens_C = torch.zeros(call.num_router_rows * share.sp, dtype=torch.int64, device=call.device)
        if call.input_ids is not None:
            tokens_C = call.input_ids.T.reshape(-1).long()
        of_ranks = _gather(_gather(tokens_C, groups.pp)[with_tokens[0]], share.cp_group).cpu().numpy()
        tokens_N = collect((share.of_context(layout, c).rows(), tokens) for c, tokens in enumerate(of_ranks))
        recorded.append(ForwardRows(lengths_S, tokens_N, ids_NLK, values_NL, call.past, width))
    return recorded


def _gather(tensor: Tensor, group: Any) -> Tensor:
    """Gather a tensor of one shape from each rank of a group, [ranks, ...]."""
    if group is None or group.size() == 1:
        return tensor[None]
    everywhere = tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:])
    torch.distributed.all_gather_into_tensor(everywhere, tensor.contiguous(), group=group)
    return everywhere.view(group.size(), *tensor.shape)

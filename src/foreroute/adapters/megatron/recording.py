"""What a Megatron-Core model recorded, put together over the ranks that share its rows and its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.megatron.forward_args import Call, on_host
from foreroute.adapters.megatron.route_shard import Share
from foreroute.errors import ReplayError
from foreroute.layout import Layout, collect
from foreroute.replay import ForwardRows, RecordedPass
from foreroute.trace import RoutedLayer, RoutingSpec


class StagePart(NamedTuple):
    """What one pipeline rank knows of one micro-batch: all rows of its layers, and tokens if it was given any.

    Attributes:
        sequences: lengths int64 [S], past positions and width, as of `ForwardRows`.
        tokens_N: int64 [N], or None.
        layers: for each routed layer its ids [N, K] and margins [N], or None where these are not asked for.
    """

    sequences: tuple[NDArray[np.int64], int, int | None]
    tokens_N: NDArray[np.int64] | None
    layers: dict[RoutedLayer, tuple[NDArray[Any] | None, ...]]


def rows_over_ranks(
    passes: list[list[RecordedPass]],
    spec: RoutingSpec,
    chunk_layers: Sequence[tuple[RoutedLayer, ...]],
    share: Share,
    groups: Any,
) -> list[ForwardRows]:
    """All rows and layers of every micro-batch, on every rank. A collective over the ranks of the model.

    Args:
        passes: of each chunk of this rank.
        spec: of the whole model.
        chunk_layers: the routed layers of each chunk.
        share: of this rank.
        groups: Megatron's.

    Raises:
        ReplayError: when no rank was given the tokens of a micro-batch.
    """
    parts = [_stage_part(of_chunks, chunk_layers, share) for of_chunks in zip(*passes, strict=True)]
    everywhere = gathered(parts, groups.pp)
    return [_joined(stages, spec) for stages in zip(*everywhere, strict=True)]


def _stage_part(
    of_chunks: Sequence[RecordedPass], chunk_layers: Sequence[tuple[RoutedLayer, ...]], share: Share
) -> StagePart:
    call: Call = of_chunks[0].args
    lengths_S, layout, width = call.sequences()
    layers: dict[RoutedLayer, tuple[NDArray[Any] | None, ...]] = {}
    for names, recorded in zip(chunk_layers, of_chunks, strict=True):
        if recorded.ids_LRK is not None:
            of_slots = (recorded.ids_LRK, recorded.margin_LR)
            of_rows = [None if each is None else _rows(layout, each.cpu().numpy(), share) for each in of_slots]
            for column, layer in enumerate(names):
                layers[layer] = tuple(None if each is None else each[:, column] for each in of_rows)
    tokens_N = None
    if call.input_ids is not None:
        of_ranks = gathered(on_host(call.input_ids).astype(np.int64), share.cp_group)
        tokens_N = collect((share.of_context(layout, c).rows(), tokens) for c, tokens in enumerate(of_ranks))
    return StagePart((lengths_S, call.past, width), tokens_N, layers)


def _rows(layout: Layout, of_slots: NDArray[Any], share: Share) -> NDArray[Any]:
    """[N, L, ...], all rows of the micro-batch, from [L, R, ...] of the ranks that share them."""
    of_ranks = gathered(gathered(of_slots.swapaxes(0, 1), share.sp_group), share.cp_group)
    return collect(
        (share.of_routers(layout, c, s).rows(), part)
        for c, of_sequence in enumerate(of_ranks)
        for s, part in enumerate(of_sequence)
    )


def _joined(stages: Sequence[StagePart], spec: RoutingSpec) -> ForwardRows:
    tokens_N = next((part.tokens_N for part in stages if part.tokens_N is not None), None)
    if tokens_N is None:
        raise ReplayError("no pipeline stage was given the tokens of a micro-batch, so that no trace can be made")
    layers = {layer: columns for part in stages for layer, columns in part.layers.items()}
    columns = zip(*(layers[layer] for layer in spec.layers), strict=True)
    stacked: list[Any] = [None if each[0] is None else np.stack(each, axis=1) for each in columns]
    ids, margins = stacked
    lengths_S, past, width = stages[0].sequences
    return ForwardRows(lengths_S, tokens_N, ids, margins, past, width)


def gathered(value: Any, group: Any) -> list[Any]:
    """The value of each rank of a group, in its order; of this one alone where ranks hold the same."""
    if group is None or group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values

"""What a Megatron-Core model recorded, put together over the ranks that share its rows and its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.megatron.forward_args import MicroBatch
from foreroute.adapters.megatron.route_shard import Share
from foreroute.errors import ReplayError
from foreroute.layout import collect
from foreroute.replay import ForwardRows, RecordedPass
from foreroute.trace import RoutedLayer, RoutingSpec


@dataclass(frozen=True)
class RankGroups:
    """Process groups over which a recording is put together: None where its ranks hold the same rows."""

    sequence: Any
    context: Any
    pipeline: Any


@dataclass(frozen=True)
class StagePart:
    """What one pipeline rank knows of one micro-batch: all rows of its layers, and tokens if it was given any.

    Attributes:
        batch: where the sequences are.
        tokens_N: int64 [N], or None.
        layers: for each routed layer its ids [N, K], margins [N] and gate weights [N, K]; None for what is not asked.
    """

    batch: MicroBatch
    tokens_N: NDArray[np.int64] | None
    layers: dict[RoutedLayer, tuple[NDArray[Any] | None, ...]]


def rows_over_ranks(
    passes: list[list[RecordedPass]],
    spec: RoutingSpec,
    chunk_layers: Sequence[tuple[RoutedLayer, ...]],
    share: Share,
    groups: RankGroups,
) -> list[ForwardRows]:
    """All rows and layers of every micro-batch, on every rank. A collective over the ranks of the model.

    Args:
        passes: of each chunk of this rank.
        spec: of the whole model.
        chunk_layers: the routed layers of each chunk.
        share: of this rank.
        groups: of the ranks.

    Raises:
        ReplayError: when no rank was given the tokens of a micro-batch.
    """
    micro_batches = list(zip(*passes, strict=True))
    parts = [_stage_part(of_chunks, chunk_layers, share, groups) for of_chunks in micro_batches]
    everywhere = _gathered(parts, groups.pipeline)
    return [_joined([stage[m] for stage in everywhere], spec) for m in range(len(parts))]


def _stage_part(
    of_chunks: Sequence[RecordedPass],
    chunk_layers: Sequence[tuple[RoutedLayer, ...]],
    share: Share,
    groups: RankGroups,
) -> StagePart:
    batch: MicroBatch = of_chunks[0].args
    layers: dict[RoutedLayer, tuple[NDArray[Any] | None, ...]] = {}
    for names, recorded in zip(chunk_layers, of_chunks, strict=True):
        if recorded.ids_LRK is not None:
            of_rows = [_rows(batch, each, share, groups) for each in _on_host(recorded)]
            for column, layer in enumerate(names):
                layers[layer] = tuple(None if each is None else each[:, column] for each in of_rows)
    return StagePart(replace(batch, tokens_C=None), _tokens(batch, share, groups), layers)


def _on_host(recorded: RecordedPass) -> list[NDArray[Any] | None]:
    """Ids [R, L, K], margins [R, L] and gate weights [R, L, K] of this rank's slots."""
    of_layers = (recorded.ids_LRK, recorded.margin_LR, recorded.weights_LRK)
    return [None if each is None else each.cpu().numpy().swapaxes(0, 1) for each in of_layers]


def _rows(batch: MicroBatch, of_slots: NDArray[Any] | None, share: Share, groups: RankGroups) -> NDArray[Any] | None:
    """All rows of the micro-batch, from the ranks that share them."""
    if of_slots is None:
        return None
    of_ranks = _gathered(_gathered(of_slots, groups.sequence), groups.context)
    return collect(
        (share.of_routers(batch.layout, c, s).rows(), part)
        for c, of_sequence in enumerate(of_ranks)
        for s, part in enumerate(of_sequence)
    )


def _tokens(batch: MicroBatch, share: Share, groups: RankGroups) -> NDArray[np.int64] | None:
    if batch.tokens_C is None:
        return None
    of_ranks = _gathered(batch.tokens_C, groups.context)
    return collect((share.of_context(batch.layout, c).rows(), tokens) for c, tokens in enumerate(of_ranks))


def _joined(stages: list[StagePart], spec: RoutingSpec) -> ForwardRows:
    tokens_N = next((part.tokens_N for part in stages if part.tokens_N is not None), None)
    if tokens_N is None:
        raise ReplayError("no pipeline stage was given the tokens of a micro-batch, so that no trace can be made")
    layers = {layer: columns for part in stages for layer, columns in part.layers.items()}
    ids, margins, weights = zip(*(layers[layer] for layer in spec.layers), strict=True)
    batch = stages[0].batch
    return ForwardRows(
        batch.lengths_S,
        tokens_N,
        np.stack(ids, axis=1),
        None if margins[0] is None else np.stack(margins, axis=1),
        None if weights[0] is None else np.stack(weights, axis=1),
        batch.past,
        batch.width,
    )


def _gathered(value: Any, group: Any) -> list[Any]:
    """The value of each rank of a group, in its order."""
    if group is None or group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values

"""What a plan needs of Megatron: its ranks, its micro-batches, the layers that can run under one, and all counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.adapters.megatron.plan_execution.layer import objection_to_layer
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.execution_ranks import ExecutionRanks, MicroBatch
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.errors import CountsError, PlacementError, TraceError
from foreroute.trace import RoutedLayer, RoutingSpec


def ranks_of_stage(ep_group: Any, pp_group: Any, options: TransferOptions) -> ExecutionRanks:
    """The expert-parallel ranks of this pipeline stage. A collective call of them.

    Args:
        ep_group: Megatron's.
        pp_group: Megatron's, of this rank's peers in the other stages; None for one stage.
        options: how weights of replicas travel.
    """
    staged = pp_group is not None and pp_group.size() > 1
    return ExecutionRanks(
        ep_group,
        RankConsensus(ep_group),
        options,
        "megatron",
        stages=RankConsensus(pp_group) if staged else None,
        gathers_late=True,  # with overlap_param_gather, Megatron gathers the weights of a layer as it runs
    )


def planned_batches(ranks: ExecutionRanks, shards: Sequence[RouteShard], what: str) -> list[MicroBatch]:
    """The micro-batches of this rank, as plans know them.

    Raises:
        TraceError: on every rank alike, when one hands in what `shard` did not make.
    """
    ranks.raise_alike(TraceError, _objection_to_shards(shards), what)
    return [MicroBatch(shard, shard.counts_LE, shard.is_whole, shard.num_routed) for shard in shards]


def require_layers(ranks: ExecutionRanks, sites: Sequence[ChunkRouter]) -> None:
    """Raise `PlacementError` on every rank alike, when a layer of one cannot execute a plan."""
    objections = ((site.path, objection_to_layer(site)) for site in sites)
    mine = next((f"the layer of {path} cannot execute a plan: {reason}" for path, reason in objections if reason), None)
    ranks.raise_alike(PlacementError, mine, "looking at the layers")


def whole_counts(
    counts_MLGE: NDArray[np.int32], layers: Sequence[RoutedLayer], spec: RoutingSpec, pp_group: Any
) -> NDArray[np.int32]:
    """Put the layers of all pipeline stages together. A collective call of them.

    Args:
        counts_MLGE: int32 [M, L here, G, E]; G may be 0 where there is no layer.
        layers: of this stage.
        spec: of the whole model.
        pp_group: Megatron's; None for one stage.

    Returns:
        int32 [M, L, G, E].

    Raises:
        CountsError: on all of them alike, when stages have other numbers of micro-batches.
    """
    stages: list[Any] = [(tuple(layers), counts_MLGE)]
    if pp_group is not None and pp_group.size() > 1:
        stages = [None] * pp_group.size()
        dist.all_gather_object(stages, (tuple(layers), counts_MLGE), group=pp_group)
    numbers = [len(counts) for _, counts in stages]
    if len(set(numbers)) > 1:
        raise CountsError(f"pipeline stages have {numbers} micro-batches; expected the same ones on each")
    columns: Mapping[RoutedLayer, NDArray[np.int32]] = {
        layer: counts[:, i] for of_stage, counts in stages for i, layer in enumerate(of_stage)
    }
    return np.stack([columns[layer] for layer in spec.layers], axis=1)


def _objection_to_shards(micro_batches: Sequence[object]) -> str | None:
    for number, each in enumerate(micro_batches):
        if not isinstance(each, RouteShard):
            return f"micro-batch {number} is a {type(each).__name__}; expected what routed.shard(trace, layout) makes"
    return None

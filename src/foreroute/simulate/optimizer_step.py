"""Seconds around the two passes, in closed form: home moves and publishing before, reduction and optimizer after them.

Nothing of it overlaps with anything, which is the most that it can cost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.plan.topology import Topology
from foreroute.simulate.config import ClusterConfig

STATE_BYTES = 12
"""Bytes of one parameter beside its weight: float32 master copy and both moments of Adam. They move with a home."""
OPTIMIZER_BYTES = 4 + 12 + 12 + 2
"""Bytes of memory traffic per parameter in an Adam step: gradient and state read, state and weight written."""


def reduction_seconds(cluster: ClusterConfig, topology: Topology, costs: CostModel) -> float:
    """Seconds of `reduction_bytes`, those over the NICs after those in the node."""
    moved, links = reduction_bytes(cluster, topology, costs), topology.links
    return moved["node"] / links.node_bytes_per_s + moved["cluster"] / links.cluster_bytes_per_s


def reduction_bytes(cluster: ClusterConfig, topology: Topology, costs: CostModel) -> dict[str, float]:
    """Bytes that a rank sends, by link, to reduce-scatter gradients and gather weights over data-parallel ranks.

    Dense parameters and experts are each taken to go through the node first and then over the NICs, where a rank has
    its part of the node's data: (r - 1) / r * B and (n - 1) / n * B / r, for B bytes on n nodes of r ranks.
    """
    model, ranks_per_node = costs.model, costs.hardware.ranks_per_node
    experts = _expert_parameters(topology, costs)
    # groups smaller than a node have data-parallel peers inside of it
    in_node = max(1, ranks_per_node // topology.num_ranks)
    size = model.gradient_bytes + model.weight_bytes
    scattered = [
        _scattered(_dense_parameters(costs) * size, cluster.gpus, ranks_per_node),
        _scattered(experts * size, cluster.groups, in_node),
    ]
    node, cluster_bytes = np.sum(scattered, axis=0).tolist()
    return {"node": node, "cluster": cluster_bytes}


def optimizer_seconds(cluster: ClusterConfig, topology: Topology, costs: CostModel) -> float:
    """An Adam step whose state is spread over data-parallel ranks, bound by memory."""
    parameters = _dense_parameters(costs) / cluster.gpus + _expert_parameters(topology, costs) / cluster.groups
    return parameters * OPTIMIZER_BYTES / costs.hardware.memory_bytes_per_s


def move_seconds(
    before_LE: NDArray[np.integer], home_LE: NDArray[np.integer], scale: float, topology: Topology, costs: CostModel
) -> float:
    """Moving homes with their optimizer state, peer to peer: the busiest link.

    `scale` are layers of the model for each layer that was planned.
    """
    is_moved_LE, width, prices = before_LE != home_LE, topology.ranks_per_node, costs.prices(topology)
    from_X, to_X = before_LE[is_moved_LE].astype(np.int64), home_LE[is_moved_LE].astype(np.int64)
    is_near_X = from_X // width == to_X // width
    # both ends of a move are busy; state never goes through host memory, whatever replicas do
    weights_s = max(
        float(np.bincount(end_X[is_near_X == is_near], minlength=1).max()) * seconds
        for is_near, seconds in ((True, prices.node_fetch_s), (False, prices.cluster_fetch_s))
        for end_X in (from_X, to_X)
    )
    return weights_s * scale * (costs.model.weight_bytes + STATE_BYTES) / costs.model.weight_bytes


def _dense_parameters(costs: CostModel) -> float:
    """Those of all layers, and the output head."""
    model = costs.model
    return model.num_layers * model.dense_parameters + model.vocabulary * model.hidden


def _expert_parameters(topology: Topology, costs: CostModel) -> float:
    """Those of a rank's experts in all layers."""
    model = costs.model
    return model.num_layers * model.num_experts / topology.num_ranks * model.expert_parameters


def _scattered(size: float, replicas: int, ranks_per_node: int) -> tuple[float, float]:
    """Bytes over the link in the node, and over the NIC."""
    in_node = min(replicas, ranks_per_node)
    # the last node may be filled in part; it is taken as a whole one
    nodes = -(-replicas // in_node)
    return (in_node - 1) / in_node * size, (nodes - 1) / nodes * size / in_node

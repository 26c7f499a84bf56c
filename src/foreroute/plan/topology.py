"""Places of experts: ranks, nodes, redundant slots, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import check_number, whole_number
from foreroute.errors import TopologyError
from foreroute.layout.rank_rows import block_homes

MOST_RANKS = 32_767
"""Plans name ranks and slots in int16."""
MOST_REDUNDANT_SLOTS = 1 << 17
"""Redundant slots of all ranks together. What they hold is kept for every layer."""
LEAST_RATE, MOST_BYTES_PER_S, MOST_LATENCY_S = 1e6, 1e18, 0.1
"""Far beyond any link, and such that no product of costs overflows. Below the least, and above the latency, are figures
in other units: 900 for 900 GB/s, 20 for 20 µs. 16 processes on two cores take 20 ms."""


@dataclass(frozen=True)
class Links:
    """Bandwidths of one rank, each direction, in bytes per second; latencies in seconds.

    Attributes:
        node_bytes_per_s: to ranks of the same node (NVLink class).
        cluster_bytes_per_s: to other nodes (the rank's NIC).
        host_bytes_per_s: from host memory to the rank (PCIe class).
        node_latency_s: all-to-all within a node.
        cluster_latency_s: all-to-all across nodes.
    """

    node_bytes_per_s: float
    cluster_bytes_per_s: float
    host_bytes_per_s: float
    node_latency_s: float
    cluster_latency_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least, most = (0, MOST_LATENCY_S) if name.endswith("_latency_s") else (LEAST_RATE, MOST_BYTES_PER_S)
            check_number(value, name=name, least=least, most=most, error=TopologyError)


@dataclass(frozen=True)
class Topology:
    """G expert-parallel ranks in nodes of equal size. Rank g is on node g // ranks_per_node.

    Attributes:
        num_ranks: G.
        ranks_per_node: ranks joined by the fast link; divides G.
        redundant_slots: replica slots per rank, 0 or more.
        links: bandwidths.
    """

    num_ranks: int
    ranks_per_node: int
    redundant_slots: int
    links: Links

    def __post_init__(self) -> None:
        for name, least in (("num_ranks", 1), ("ranks_per_node", 1), ("redundant_slots", 0)):
            value = whole_number(getattr(self, name), name=name, least=least, most=MOST_RANKS, error=TopologyError)
            object.__setattr__(self, name, value)
        if self.num_ranks % self.ranks_per_node:
            raise TopologyError(
                f"{self.num_ranks} ranks do not fill nodes of {self.ranks_per_node}; expected a multiple"
            )
        if self.num_ranks * self.redundant_slots > MOST_REDUNDANT_SLOTS:
            raise TopologyError(
                f"redundant_slots is {self.redundant_slots} on each of {self.num_ranks} ranks; expected at most "
                f"{MOST_REDUNDANT_SLOTS} in all"
            )

    @property
    def num_nodes(self) -> int:
        """N, nodes that the ranks fill."""
        return self.num_ranks // self.ranks_per_node

    @property
    def node_G(self) -> NDArray[np.int16]:
        """int16 [G], the node of each rank."""
        return (np.arange(self.num_ranks) // self.ranks_per_node).astype(np.int16)

    def contiguous_home_LE(self, num_layers: int, num_experts: int) -> NDArray[np.int16]:
        """Return the usual placement, int16 [L, E]: E / G experts in a row to a rank. G divides E (`LayoutError`)."""
        return np.tile(block_homes(num_experts, self.num_ranks).astype(np.int16), (num_layers, 1))


def check_homes(home_LE: ArrayLike, num_layers: int, num_experts: int, num_ranks: int) -> NDArray[np.int16]:
    """Homes as int16 [L, E]. Raises `TopologyError` for another shape or type, or not E / G experts on every rank."""
    given: NDArray[Any] = np.asarray(home_LE)
    if given.shape != (num_layers, num_experts) or given.dtype.kind not in "iu":
        raise TopologyError(
            f"got homes of dtype {given.dtype} and shape {given.shape}; "
            f"expected the rank of each of {num_experts} experts in {num_layers} layers"
        )
    is_there_LE = (given >= 0) & (given < num_ranks)
    if not is_there_LE.all():
        layer, expert = np.argwhere(~is_there_LE)[0]
        raise TopologyError(
            f"in layer {layer}, an expert lives on rank {given[layer, expert]}; expected ranks from 0 to "
            f"{num_ranks - 1}"
        )
    homes = np.require(given, np.int16, ["C", "A", "W"])  # as compiled loops take them
    place_LE = np.arange(num_layers)[:, None] * num_ranks + homes
    held_LG = np.bincount(place_LE.ravel(), minlength=num_layers * num_ranks).reshape(num_layers, num_ranks)
    if (held_LG != num_experts // num_ranks).any():
        layer, g = np.argwhere(held_LG != num_experts // num_ranks)[0]
        raise TopologyError(
            f"in layer {layer}, rank {g} is home to {held_LG[layer, g]} experts; "
            f"expected {num_experts // num_ranks} on every rank"
        )
    return homes

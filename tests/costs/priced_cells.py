"""One cell by the cost model, with the loads of its ranks."""

from typing import NamedTuple

import numpy as np

from foreroute.costs.links import pairs_between
from foreroute.costs.pricing import cell_seconds, slowest_attention


class CellFigures(NamedTuple):
    """Loads of all ranks, the share of assignments served on another node, and seconds [2 passes, 5 parts]."""

    loads_G: np.ndarray
    cross_node_share: float
    parts_SP: np.ndarray

    @property
    def seconds(self):
        return float(self.parts_SP.sum())


def price_cell(cell, counts_GE, topology, costs, slots="layer"):
    counts = np.ascontiguousarray(counts_GE, np.int32)
    pairs_GG = pairs_between(cell, counts)
    parts_SP = cell_seconds(cell, counts, slowest_attention(counts, costs), costs.prices(topology, slots))
    node_G = topology.node_G
    total, away = int(pairs_GG.sum()), int(pairs_GG[node_G[:, None] != node_G].sum())
    return CellFigures(pairs_GG.sum(axis=0), away / total if total else 0.0, parts_SP)

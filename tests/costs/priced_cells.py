"""One cell by the cost model."""

import numpy as np

from foreroute.costs.pricing import cell_seconds, slowest_attention


def price_cell(cell, counts_GE, topology, costs, slots="layer"):
    """Seconds: [2 passes, 5 parts]."""
    counts = np.ascontiguousarray(counts_GE, np.int32)
    return cell_seconds(cell, counts, slowest_attention(counts, costs), costs.prices(topology, slots))

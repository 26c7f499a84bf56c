"""Fetches are priced over the links that executors send them by: by hand, in float64."""

import numpy as np
import pytest

from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.costs.pricing import ALL_TO_ALL, price_cell
from foreroute.plan import CellPlan

H100 = HARDWARE["h100"]
EXPERT_BYTES = 3 * 2048 * 768 * 2


@pytest.mark.parametrize(
    ("rank", "bytes_per_s", "shares_links"),
    [(1, H100.links.host_bytes_per_s, False), (8, H100.links.cluster_bytes_per_s, True)],
)
def test_a_replica_comes_from_host_memory_within_its_node_and_over_nics_from_another(rank, bytes_per_s, shares_links):
    """Two nodes of eight; expert 0 lives on rank 0, and a replica serves one assignment of it."""
    topology, costs = H100.topology(16, 1), CostModel(model=MODELS["qwen3-30b-a3b"], hardware=H100)
    replica, serves = np.array([rank], np.int16), np.eye(1, 16, dtype=np.int32)
    cell = CellPlan(np.zeros(1, np.int16), 0 * replica, replica, 0 * replica, np.array([True]), serves)
    parts_P = price_cell(cell, 2 * serves.T, topology, costs).parts_SP[0]
    # a copy from host memory runs beside everything, a message while no all-to-all is on the links
    beside_s = parts_P.sum() - (parts_P[ALL_TO_ALL] if shares_links else 0)
    assert beside_s == pytest.approx(EXPERT_BYTES / bytes_per_s, rel=1e-12)

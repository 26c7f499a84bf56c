"""Fetches are priced over the links that executors send them by: by hand, in float64."""

import numpy as np
import pytest

from foreroute.costs.figures import price_cell
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.plan import CellHosts

H100 = HARDWARE["h100"]
EXPERT_BYTES = 3 * 2048 * 768 * 2


@pytest.mark.parametrize(
    ("rank", "bytes_per_s", "shares_links"),
    [(1, H100.links.host_bytes_per_s, False), (8, H100.links.cluster_bytes_per_s, True)],
)
def test_a_replica_comes_from_host_memory_within_its_node_and_over_nics_from_another(rank, bytes_per_s, shares_links):
    """Two nodes of eight; expert 0 lives on rank 0, and a replica serves one assignment of it."""
    topology, costs = H100.topology(16, 1), CostModel(model=MODELS["qwen3-30b-a3b"], hardware=H100)
    hosts = CellHosts(
        np.array([0, 0], np.int32),
        np.array([0, rank], np.int32),
        np.eye(2, 16, dtype=np.int64),
        np.array([False, True]),
    )
    seconds = price_cell(hosts, np.zeros(1, np.int64), topology, costs).recompute
    # a copy from host memory runs beside everything, a message while no all-to-all is on the links
    hidden_s = seconds.attention + seconds.experts + seconds.fixed + (0 if shares_links else seconds.all_to_all)
    assert hidden_s + seconds.exposed == pytest.approx(EXPERT_BYTES / bytes_per_s, rel=1e-12)

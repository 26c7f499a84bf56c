"""Fetches are priced over the links that executors send them by: by hand, in float64."""

import numpy as np
import pytest

from foreroute.costs import links
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.costs.pricing import ALL_TO_ALL, price_cell
from foreroute.plan import CellPlan, ExecutionSchedule
from tests.plan.random_plans import random_counts, random_plan

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


@pytest.mark.parametrize("paths", ["host", "direct"])
def test_gradients_return_from_every_replica_as_executors_send_them(paths):
    """From those too that their slots keep: what a schedule says that a rank serves, it sends home in the update."""
    topology, counts_MLGE = H100.topology(16, 2), random_counts(0, (3, 2, 16, 32))
    plan = random_plan(counts_MLGE, topology, keep=0.6)
    assert 0 < plan.hosts.fetched_R.mean() < 1
    costs = CostModel(model=MODELS["qwen3-30b-a3b"], hardware=H100, paths=paths)
    prices = costs.prices(topology)
    schedules = [ExecutionSchedule(plan, counts_MLGE, rank, paths=paths) for rank in range(16)]
    for place in np.ndindex(3, 2):
        sent_G5 = np.zeros((16, 5))
        for rank, schedule in enumerate(schedules):
            for home in schedule.cell(*place).served["peer"]:
                is_near = home // 8 == rank // 8
                sent_G5[rank, links.NODE_OUT if is_near else links.CLUSTER_OUT] += 1
                sent_G5[home, links.NODE_IN if is_near else links.CLUSTER_IN] += 1
        cell = plan.cell(*place)
        _, gradient_G5 = links.transfer_seconds(cell.expert_R, cell.rank_R, cell.fetched_R, cell.home_E, 16, prices)
        seconds_5 = np.zeros(5)
        seconds_5[[links.NODE_OUT, links.NODE_IN]] = prices.node_gradient_s
        seconds_5[[links.CLUSTER_OUT, links.CLUSTER_IN]] = prices.cluster_gradient_s
        np.testing.assert_allclose(gradient_G5, sent_G5 * seconds_5, rtol=1e-12)

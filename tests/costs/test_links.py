"""Fetches are priced over the links that executors send them by, and no plan takes less time than the bound."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs import links
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.costs.pricing import least_seconds, step_parts, work_of_cells
from foreroute.plan import Topology
from foreroute.plan.schedule import ExecutionSchedule
from tests.costs.cost_oracle import price_plan
from tests.plan.random_plans import LINKS, random_counts, random_plan

H100 = HARDWARE["h100"]
COSTS = CostModel(model=MODELS["qwen3-30b-a3b"], hardware=H100)


@pytest.mark.parametrize("paths", ["host", "direct"])
def test_gradients_return_from_every_replica_as_executors_send_them(paths):
    """From those too that their slots keep: what a schedule says that a rank serves, it sends home in the update."""
    topology, counts_MLGE = H100.topology(16, 2), random_counts(0, (3, 2, 16, 32))
    plan = random_plan(counts_MLGE, topology, keep=0.6)
    assert 0 < plan.hosts.fetched_R.mean() < 1
    prices = replace(COSTS, paths=paths).prices(topology)
    gradient_MLG5 = work_of_cells(plan.hosts, counts_MLGE, prices).gradient_MLG5
    seconds_5 = np.zeros(5)
    seconds_5[[links.NODE_OUT, links.NODE_IN]] = prices.node_gradient_s
    seconds_5[[links.CLUSTER_OUT, links.CLUSTER_IN]] = prices.cluster_gradient_s
    schedules = [ExecutionSchedule(plan, counts_MLGE, rank, paths=paths) for rank in range(16)]
    for place in np.ndindex(3, 2):
        sent_G5 = np.zeros((16, 5))
        for rank, schedule in enumerate(schedules):
            for home in schedule.cell(*place).hosted["peer"]:
                is_near = home // 8 == rank // 8
                sent_G5[rank, links.NODE_OUT if is_near else links.CLUSTER_OUT] += 1
                sent_G5[home, links.NODE_IN if is_near else links.CLUSTER_IN] += 1
        np.testing.assert_allclose(gradient_MLG5[place], sent_G5 * seconds_5, rtol=1e-12)


@pytest.mark.parametrize("dispatcher", ["copies", "dedup"])
def test_no_plan_is_faster_and_level_local_tokens_attain_the_bound(dispatcher):
    for seed in range(20):
        costs = replace(COSTS, dispatcher=dispatcher, paths=("host", "direct")[seed % 2])
        ranks = (1, 2, 4, 8)[seed % 4]
        counts = random_counts(seed, (2, 2, ranks, 16), most=(3, 300, 30_000)[seed % 3])
        plan = random_plan(counts, Topology(ranks, max(ranks // 2, 1), 2 if ranks > 1 else 0, LINKS), seed=seed)
        least_ML = least_seconds(counts, plan.topology, costs)
        assert (price_plan(plan, counts, costs) >= least_ML * (1 - 1e-12)).all()
        if ranks == 1:
            np.testing.assert_allclose(price_plan(plan, counts, costs), least_ML, rtol=1e-12)
    # every rank sends the same, whole tiles, to its own expert: no byte moves
    counts = 1280 * np.eye(4, dtype=np.int64)[None, None]
    plan = random_plan(counts, Topology(4, 2, 0, LINKS))
    plan.home_LE[:] = np.arange(4)
    np.testing.assert_allclose(price_plan(plan, counts, COSTS), least_seconds(counts, plan.topology, COSTS), rtol=1e-12)


def test_counts_in_any_order_and_of_any_type_cost_the_same():
    counts = random_counts(0, (3, 2, 4, 8), most=300)
    plan = random_plan(counts, Topology(4, 2, 1, LINKS))
    parts_SP = step_parts(plan.hosts, counts, plan.topology, COSTS)
    same = np.asfortranarray(counts.astype(np.int32))
    np.testing.assert_array_equal(step_parts(plan.hosts, same, plan.topology, COSTS), parts_SP)

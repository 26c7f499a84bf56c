"""Fetches are priced over the links that executors send them by, and no plan takes less time than the bound."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.costs.pricing import least_seconds
from foreroute.plan import Topology
from tests.costs.cost_oracle import price_plan
from tests.plan.random_plans import LINKS, random_counts, random_plan

H100 = HARDWARE["h100"]
COSTS = CostModel(model=MODELS["qwen3-30b-a3b"], hardware=H100)


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

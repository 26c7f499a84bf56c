"""No plan takes less time than the bound, and where nothing is to be planned it is the time."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.costs.pricing import least_seconds, price_cell
from foreroute.plan import Topology
from tests.plan.random_plans import LINKS, random_counts, random_plan

COSTS = CostModel(model=model_preset("qwen3-30b-a3b"), hardware=hardware_preset("h100"))


def taken(plan, counts_MLGE, costs):
    seconds_ML = np.empty(plan.shape[:2])
    for m, layer in np.ndindex(seconds_ML.shape):
        seconds_ML[m, layer] = price_cell(plan.cell(m, layer), counts_MLGE[m, layer], plan.topology, costs).seconds
    return seconds_ML


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dispatcher", ["copies", "dedup"])
def test_no_plan_is_faster(seed, dispatcher):
    costs = replace(COSTS, dispatcher=dispatcher, paths=("host", "direct")[seed % 2])
    ranks = (2, 4, 8)[seed % 3]
    counts = random_counts(seed, (2, 2, ranks, 16), most=(3, 300, 30_000)[seed % 3])
    plan = random_plan(counts, Topology(ranks, max(ranks // 2, 1), 2, LINKS), seed=seed)
    assert (taken(plan, counts, costs) >= least_seconds(counts, plan.topology, costs) * (1 - 1e-12)).all()


def test_one_rank_takes_what_the_bound_says():
    counts = random_counts(1, (3, 2, 1, 8), most=5000)
    plan = random_plan(counts, Topology(1, 1, 0, LINKS))
    np.testing.assert_allclose(taken(plan, counts, COSTS), least_seconds(counts, plan.topology, COSTS), rtol=1e-12)


def test_level_experts_and_local_tokens_attain_it():
    """Every rank sends the same, whole tiles, to its own expert: no byte moves."""
    counts = np.zeros((1, 1, 4, 4), np.int64)
    counts[0, 0] = 1280 * np.eye(4, dtype=np.int64)
    plan = random_plan(counts, Topology(4, 2, 0, LINKS))
    plan.home_LE[:] = np.arange(4)
    np.testing.assert_allclose(taken(plan, counts, COSTS), least_seconds(counts, plan.topology, COSTS), rtol=1e-12)

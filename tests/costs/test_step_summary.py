"""A survey is what a plain look at every cell gives."""

import numpy as np
import pytest

from foreroute.costs.figures import least_seconds, price_cell, summarize
from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.errors import CountsError
from foreroute.plan import Topology
from foreroute.plan.step_plan import CellHosts
from tests.plan.random_plans import LINKS, random_counts, random_plan

COSTS = CostModel(model=model_preset("qwen3-30b-a3b"), hardware=hardware_preset("h100"))
TOPOLOGY = Topology(4, 2, 2, LINKS)


@pytest.fixture(scope="module")
def case():
    counts = random_counts(0, (3, 2, 4, 8), most=900)
    counts[1, 1] = 0
    plan = random_plan(counts, TOPOLOGY, seed=1, moves=4)
    return counts, plan, summarize(plan, counts, COSTS, previous_LE=random_counts(9, (2, 8)) + 1)


def test_loads_and_seconds_of_both_sides(case):
    counts, plan, seen = case
    for m, layer in np.ndindex(3, 2):
        figures = price_cell(CellHosts.of(plan.cell(m, layer), counts[m, layer]), plan.home_LE[layer], TOPOLOGY, COSTS)
        assert seen.after.loads_MLG[m, layer].tolist() == figures.loads_G.tolist()
        assert seen.after.parts_MLSP[m, layer].sum() == pytest.approx(figures.seconds)
        assert seen.after.parts_MLSP[m, layer, 1].tolist() == list(figures.update)
        at_home = [int(counts[m, layer][:, plan.previous_home_LE[layer] == g].sum()) for g in range(4)]
        assert seen.before.loads_MLG[m, layer].tolist() == at_home
        away = sum(
            int(counts[m, layer, g, e])
            for g in range(4)
            for e in range(8)
            if plan.previous_home_LE[layer, e] // 2 != g // 2
        )
        total = int(counts[m, layer].sum())
        assert seen.before.crossing_ML[m, layer] == pytest.approx(away / total if total else 0)
    assert seen.after.loads_MLG.max(axis=2).tolist() == plan.max_load_ML.tolist()
    total_ML = counts.sum(axis=(2, 3))
    assert seen.before.crossing == pytest.approx((seen.before.crossing_ML * total_ML).sum() / total_ML.sum())
    assert seen.after.seconds == pytest.approx(seen.after.parts_MLSP.sum())
    assert seen.least_seconds == pytest.approx(least_seconds(counts, TOPOLOGY, COSTS).sum())


def test_ratios_of_empty_cells_are_one(case):
    _, plan, seen = case
    assert seen.before.imbalance_ML[1, 1] == seen.after.imbalance_ML[1, 1] == seen.bound_ML[1, 1] == 1
    assert np.isnan(seen.fluctuation_ML[1, 1])
    mean_ML = seen.after.loads_MLG.mean(axis=2)
    assert seen.bound_ML[0].tolist() == (plan.bound_ML[0] / mean_ML[0]).tolist()
    uneven_L = [
        np.mean([g.max() / g.mean() if g.any() else 1 for g in seen.before.loads_MLG[:, layer]]) for layer in (0, 1)
    ]
    assert seen.most_uneven_layer == int(np.argmax(uneven_L))


def test_distances_and_transfers(case):
    counts, plan, seen = case
    for m, layer in ((0, 0), (2, 1)):
        cell_E, step_E = counts[m, layer].sum(axis=0), counts[:, layer].sum(axis=(0, 1))
        expected = np.maximum(cell_E / cell_E.sum() - step_E / step_E.sum(), 0).sum()
        assert seen.fluctuation_ML[m, layer] == pytest.approx(expected)
    step_E, before_E = counts[:, 1].sum(axis=(0, 1)), (random_counts(9, (2, 8)) + 1)[1]
    assert seen.drift_L[1] == pytest.approx(np.maximum(step_E / step_E.sum() - before_E / before_E.sum(), 0).sum())
    whole_G = seen.before.loads_MLG[:, 0].sum(axis=0)
    assert seen.step_imbalance_L[0] == pytest.approx(whole_G.max() / whole_G.mean())
    for m, layer in np.ndindex(3, 2):
        assert seen.fetched_ML[m, layer] == plan.cell(m, layer).fetched_R.sum()


def test_the_step_before_may_be_unknown_but_not_another_model(case):
    counts, plan, _ = case
    assert summarize(plan, counts, COSTS).drift_L is None
    with pytest.raises(CountsError, match=r"\[2, 9\] layers and experts, this one \[2, 8\]"):
        summarize(plan, counts, COSTS, previous_LE=np.ones((2, 9), np.int64))

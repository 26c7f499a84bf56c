"""Records are what a plain count of every cell gives."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.figures import price_cell
from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.errors import ConfigError, CountsError
from foreroute.plan import PlanOptions, Topology
from foreroute.plan.step_plan import CellHosts
from foreroute.planner import plan
from foreroute.planner.balancers import BALANCERS, BalancerInput
from foreroute.planner.compare import compare, priced
from tests.plan.random_plans import LINKS

COSTS = CostModel(model=model_preset("qwen3-30b-a3b"), hardware=hardware_preset("h100"))


def problem(seed=0):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rng.pareto(2.0, (3, 2, 1, 16)) * 40, (3, 2, 8, 16))
    topology = Topology(8, 4, 2, LINKS)
    return BalancerInput(counts, topology, np.tile(topology.contiguous_home_E(16), (2, 1)), counts.sum(axis=(0, 2)))


@pytest.mark.parametrize("name", BALANCERS)
def test_by_hand(name):
    given = priced(problem(), COSTS)
    (record,) = compare(given, COSTS, plans={}, baselines=[name])
    found = list(BALANCERS[name].method(given))
    largest = np.array([a.loads_G.max() for a in found])
    total = given.counts_MLGE.sum(axis=(2, 3)).reshape(-1)
    assert record.label == BALANCERS[name].label
    assert record.cells == 6
    assert record.slowest_load == largest.sum()
    assert record.of_bound == pytest.approx(np.ceil(total / 8).sum() / largest.sum())
    ratios = largest / total * 8
    figures = (record.imbalance_mean, record.imbalance_p99, record.imbalance_worst)
    assert figures == pytest.approx((ratios.mean(), np.quantile(ratios, 0.99), ratios.max()))
    moved = sum(int(a.fetched_H.sum()) for a in found)
    assert record.fetches_per_cell * 6 + record.home_moves == pytest.approx(moved)
    moved_bytes = record.node_bytes + record.cluster_bytes
    assert moved_bytes == pytest.approx(record.fetches_per_cell * 6 * COSTS.model.expert_bytes)
    away = sum(int(a.tokens_HG[a.rank_H // 4 != g // 4, g].sum()) for a in found for g in range(8))
    assert record.cross_node_share == pytest.approx(away / total.sum())
    if not BALANCERS[name].rehomes:
        assert record.home_moves == 0
        cells = zip(found, np.tile(given.home_LE, (3, 1)), strict=True)
        assert record.seconds == pytest.approx(sum(price_cell(a, h, given.topology, COSTS).seconds for a, h in cells))


def test_ours_by_hand():
    given, options = problem(1), PlanOptions(tolerance=0.0)
    (record,) = compare(given, COSTS, plans={"exact": options}, baselines=[])
    found = plan(given.counts_MLGE, given.topology, options, costs=COSTS)
    assert record.label == "exact"
    assert record.slowest_load == found.max_load_ML.sum()
    assert record.fetches_per_cell == found.fetched_R.sum() / 6
    seconds = 0.0
    for m, layer in np.ndindex(3, 2):
        assignment = CellHosts.of(found.cell(m, layer), given.counts_MLGE[m, layer])
        seconds += price_cell(assignment, found.home_LE[layer], given.topology, COSTS).seconds
    assert record.seconds == pytest.approx(seconds)


def test_rows_packing_and_ours_come_last():
    given = problem(2)
    even = np.full_like(given.counts_MLGE, 5)
    records = list(compare(given, COSTS, baselines=["static", "eplb_step"], packed_MLGE=even))
    assert [r.name for r in records] == ["static", "eplb_step", "packing", "ours"]
    assert records[2].imbalance_worst == 1
    assert records[2].label == "sequence packing alone"
    assert records[0].imbalance_mean > records[3].imbalance_mean
    assert records[0].as_dict()["planning_s"] > 0


def test_what_is_not_known_is_left_out_and_what_does_not_exist_refused():
    given = BalancerInput(problem().counts_MLGE, problem().topology, problem().home_LE)
    assert [r.name for r in compare(given, COSTS, plans={}, baselines=["eplb_previous", "static"])] == ["static"]
    with pytest.raises(ConfigError, match="no baseline called eplb; expected some of static"):
        list(compare(given, COSTS, baselines=["eplb"]))


def test_what_does_not_fit_is_refused():
    given = problem()
    for wrong in (
        replace(given, home_LE=given.home_LE[:1]),
        replace(given, previous_LE=given.previous_LE[:, :3]),
        replace(given, counts_MLGE=given.counts_MLGE[:, :, :4]),
        replace(given, counts_MLGE=given.counts_MLGE * 0.5),
    ):
        with pytest.raises(CountsError, match="expected"):
            list(compare(wrong, COSTS, plans={}, baselines=["static"]))


def test_homes_that_move_before_the_step_are_not_charged_to_its_first_cell():
    given = problem(3)
    (record,) = compare(given, COSTS, plans={}, baselines=["lplb"])
    first_of_layer = list(BALANCERS["lplb"].method(given))[:2]
    kept = sum(int((~a.fetched_H[:16]).sum()) for a in first_of_layer)
    assert record.home_moves == 32 - kept
    assert record.fetches_per_cell * 6 == sum(int(a.fetched_H[16:].sum()) for a in first_of_layer)


def test_prices_are_of_all_passes():
    found = priced(problem(), COSTS)
    prices = COSTS.prices(found.topology)
    # forward in the recompute, forward twice and backward once in the update
    assert found.crossing_s == pytest.approx(8 * prices.cluster_row_s)
    assert found.transfer_s == pytest.approx(3 * prices.host_fetch_s)
    assert found.assignment_s == pytest.approx(5 * prices.row_s + 4.6 * prices.pair_s)


def test_empty_steps_cost_no_more_than_latency():
    given = problem()
    empty = BalancerInput(np.zeros_like(given.counts_MLGE), given.topology, given.home_LE)
    for record in compare(empty, COSTS):
        assert record.imbalance_worst == 1
        assert record.of_bound == 1
        assert record.cross_node_share == 0

"""Records are what a plain count of every cell gives."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.balancers import OTHER_BALANCERS
from foreroute.costs.figures import price_cell
from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.errors import CountsError
from foreroute.plan import PlanOptions, Topology
from foreroute.plan.step_plan import CellHosts
from foreroute.planner import plan
from foreroute.planner.balancers import BALANCERS as IN_THE_WHEEL
from foreroute.planner.balancers import BalancerInput
from foreroute.planner.compare import compare, record_of
from foreroute.planner.methods import METHODS, priced, run_method
from tests.plan.random_plans import LINKS

BALANCERS = IN_THE_WHEEL | OTHER_BALANCERS

COSTS = CostModel(model=model_preset("qwen3-30b-a3b"), hardware=hardware_preset("h100"))


def problem(seed=0):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rng.pareto(2.0, (3, 2, 1, 16)) * 40, (3, 2, 8, 16))
    topology = Topology(8, 4, 2, LINKS)
    return BalancerInput(counts, topology, np.tile(topology.contiguous_home_E(16), (2, 1)), counts.sum(axis=(0, 2)))


@pytest.mark.parametrize("name", BALANCERS)
def test_by_hand(name):
    given = priced(problem(), COSTS)
    (record,) = compare(given, COSTS, {name: BALANCERS[name]})
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
    found = plan(given.counts_MLGE, given.topology, options, costs=COSTS)
    record = record_of(found, given.counts_MLGE, COSTS, label="exact", planning_s=0.5)
    assert record.planning_s == 0.5
    assert record.label == "exact"
    assert record.slowest_load == found.max_load_ML.sum()
    assert record.fetches_per_cell == found.fetched_R.sum() / 6
    seconds = 0.0
    for m, layer in np.ndindex(3, 2):
        assignment = CellHosts.of(found.cell(m, layer), given.counts_MLGE[m, layer])
        seconds += price_cell(assignment, found.home_LE[layer], given.topology, COSTS).seconds
    assert record.seconds == pytest.approx(seconds)


def test_records_come_in_the_order_of_the_balancers():
    given = problem(2)
    records = list(compare(given, COSTS, {name: BALANCERS[name] for name in ("eplb_step", "static")}))
    assert [r.name for r in records] == ["eplb_step", "static"]
    assert records[1].imbalance_mean > records[0].imbalance_mean
    assert records[0].as_dict()["planning_s"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_run_serves_every_cell_and_knows_its_homes(name):
    given = problem(4)
    run = run_method(METHODS[name], given, COSTS)
    cells = list(run.cells)
    assert len(cells) == 6
    assert run.planning_s > 0
    for c, (hosts, counts_GE) in enumerate(zip(cells, given.counts_MLGE.reshape(6, 8, 16), strict=True)):
        served_EG = np.zeros((16, 8), int)
        np.add.at(served_EG, hosts.expert_H, hosts.tokens_HG)
        np.testing.assert_array_equal(served_EG.T, counts_GE)
        homes = set(zip(range(16), run.home_LE[c % 2].tolist(), strict=True))
        if name != "eplb_micro_step":  # it hosts experts where it likes, and their gradients go home
            assert homes <= set(zip(hosts.expert_H.tolist(), hosts.rank_H.tolist(), strict=True))
    moved = [(layer, e, given.home_LE[layer, e], run.home_LE[layer, e]) for layer, e in np.ndindex(2, 16)]
    assert run.home_moves.tolist() == [list(move) for move in moved if move[2] != move[3]]


def test_what_is_not_known_is_left_out():
    given = BalancerInput(problem().counts_MLGE, problem().topology, problem().home_LE)
    assert [r.name for r in compare(given, COSTS)] == ["static", "eplb_step", "eplb_micro_step"]


def test_what_does_not_fit_is_refused():
    given = problem()
    for wrong in (
        replace(given, home_LE=given.home_LE[:1]),
        replace(given, previous_LE=given.previous_LE[:, :3]),
        replace(given, counts_MLGE=given.counts_MLGE[:, :, :4]),
        replace(given, counts_MLGE=given.counts_MLGE * 0.5),
    ):
        with pytest.raises(CountsError, match="expected"):
            list(compare(wrong, COSTS))


def test_homes_that_move_before_the_step_are_not_charged_to_its_first_cell():
    given = problem(3)
    (record,) = compare(given, COSTS, {"lplb": BALANCERS["lplb"]})
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


def test_a_plan_is_not_recorded_on_counts_of_another_step():
    given = problem()
    found = plan(given.counts_MLGE, given.topology)
    for other in (given.counts_MLGE[:2], given.counts_MLGE[:, :, :4], given.counts_MLGE[..., :8]):
        with pytest.raises(CountsError, match=r"counts are \[.*\]; the plan is for \[3, 2, 8, 16\]"):
            record_of(found, other, COSTS, label="other", planning_s=0.0)

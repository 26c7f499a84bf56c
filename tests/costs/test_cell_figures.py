"""Figures of a cell against a slow oracle, deals of single picks, and what more bandwidth may not do."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.planner_oracles import CellHosts
from foreroute.costs import links
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.errors import CountsError
from foreroute.plan import CellPlan, Topology
from foreroute.simulate.workload import WORKLOADS
from tests.costs.cost_oracle import expected_messages, messages, seconds
from tests.costs.priced_cells import price_cell
from tests.costs.token_hosts import CellRoutes, assign_picks, price_tokens, rows_of_tokens
from tests.plan.random_plans import LINKS, random_plan
from tests.simulate.drawn_routes import routes_of

SMALL = replace(MODELS["qwen3-30b-a3b"], top_k=2, num_experts=8)
COSTS = CostModel(model=SMALL, hardware=HARDWARE["h100"])


def _routes(seed, num_ranks, num_experts, top_k, most=40):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, most, num_ranks)
    taste = rng.gamma(0.5, size=num_experts)
    scores = taste + rng.gumbel(size=(lengths.sum(), num_experts))
    ids_TK = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int16)
    return CellRoutes(ids_TK, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def _case(seed, num_ranks=4, ranks_per_node=2, slots=2, top_k=2, **kinds):
    """Routes, and hosts of no merit."""
    routes = _routes(seed, num_ranks, 8, top_k)
    topology = Topology(num_ranks, ranks_per_node, slots, LINKS)
    counts_GE = routes.counts_GE(8)
    cell = random_plan(counts_GE[None, None], topology, seed=seed).cell(0, 0)
    costs = replace(COSTS, model=replace(SMALL, top_k=top_k), **kinds)
    return routes, cell, counts_GE, topology, costs


def _oracle(cell, counts_GE, rows, topology, costs, squares_G=None, slots="layer"):
    home_E, at_home_E = cell.home_E, cell.home_tokens_GE(counts_GE).sum(axis=0)
    hosts = [(e, int(home_E[e]), int(at_home_E[e]), False) for e in range(8)]
    for expert, rank, _, fetched, tokens_G in zip(*cell[1:], strict=True):
        hosts.append((int(expert), int(rank), int(tokens_G.sum()), bool(fetched)))
    tokens_G = counts_GE.sum(axis=1) / costs.model.top_k
    squares_G = tokens_G * costs.sequence_tokens if squares_G is None else squares_G
    return seconds(hosts, home_E, rows, tokens_G, squares_G, topology, costs, slots)


def _agree(figures, rows_G4, expected, rows):
    for parts_P, pass_name in zip(figures.parts_SP, ("recompute", "update"), strict=True):
        assert parts_P.tolist() == pytest.approx(list(expected[pass_name].values()), rel=1e-12)
    for link, direction in itertools.product(("cluster", "node"), ("out", "in")):
        by_hand = [rows.get((link, direction, g), 0) for g in range(len(rows_G4))]
        assert rows_G4[:, getattr(links, f"{link}_{direction}".upper())] == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("paths", ["host", "direct"])
@pytest.mark.parametrize("dispatcher", ["copies", "dedup"])
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(4, 2), (8, 2), (4, 4), (4, 1)])
def test_figures_equal_the_slow_oracle_token_by_token(dispatcher, paths, num_ranks, ranks_per_node):
    for seed in range(8):
        routes, cell, counts_GE, topology, costs = _case(
            seed, num_ranks, ranks_per_node, top_k=1 + seed % 3, dispatcher=dispatcher, paths=paths
        )
        squares_G = np.arange(1, num_ranks + 1) * 1e6 if seed % 2 else None
        hosts = CellHosts.of(cell, counts_GE)
        host_TK = assign_picks(hosts, routes, ranks_per_node)
        source_T = np.repeat(np.arange(num_ranks), np.diff(routes.offsets))
        sends = [(int(g), [int(hosts.rank_H[h]) for h in row]) for g, row in zip(source_T, host_TK, strict=True)]
        rows = messages(sends, ranks_per_node, dispatcher)
        slots = ("layer", "shared")[seed // 2 % 2]
        figures = price_tokens(cell, counts_GE, topology, costs, routes=routes, squares_G=squares_G, slots=slots)
        rows_G4 = rows_of_tokens(cell, counts_GE, topology, costs, routes)
        _agree(figures, rows_G4, _oracle(cell, counts_GE, rows, topology, costs, squares_G, slots), rows)
        if dispatcher == "copies":  # which needs no estimate
            figures = price_cell(cell, counts_GE, topology, costs, slots)
            if squares_G is None:
                _agree(figures, rows_G4, _oracle(cell, counts_GE, rows, topology, costs, None, slots), rows)
        loads_G = [sum(rank == g for _, ranks in sends for rank in ranks) for g in range(num_ranks)]
        assert figures.loads_G.tolist() == loads_G
        crossing = sum(rank // ranks_per_node != g // ranks_per_node for g, ranks in sends for rank in ranks)
        assert figures.cross_node_share == pytest.approx(crossing / max(1, sum(loads_G)))


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_the_estimate_is_the_expectation_of_independent_picks(ranks_per_node):
    for seed in range(5):
        _, cell, counts_GE, topology, costs = _case(seed, 8, ranks_per_node, top_k=2, dispatcher="dedup")
        pairs_GG = np.zeros((8, 8), np.int64)
        np.add.at(pairs_GG.T, cell.home_E, cell.home_tokens_GE(counts_GE).T)
        np.add.at(pairs_GG.T, cell.rank_R, cell.tokens_RG)
        rows = expected_messages(pairs_GG, 2, ranks_per_node)
        rows_G4 = links.rows_sent(pairs_GG, costs.prices(topology))
        expected = _oracle(cell, counts_GE, rows, topology, costs)
        _agree(price_cell(cell, counts_GE, topology, costs), rows_G4, expected, rows)


def test_rows_out_are_rows_in_and_one_node_sends_nothing_out():
    for seed in range(10):
        routes, cell, counts_GE, topology, costs = _case(seed, 8, 4 if seed % 2 else 8)
        estimate_G4 = links.rows_sent(links.pairs_between(cell, counts_GE), costs.prices(topology))
        for rows_G4 in (estimate_G4, rows_of_tokens(cell, counts_GE, topology, costs, routes)):
            rows_4 = rows_G4.sum(axis=0)
            assert rows_4[links.CLUSTER_OUT] == pytest.approx(rows_4[links.CLUSTER_IN])
            assert rows_4[links.NODE_OUT] == pytest.approx(rows_4[links.NODE_IN])
            assert (rows_4[links.CLUSTER_OUT] == 0) == (topology.num_nodes == 1)


@given(st.integers(0, 10_000), st.sampled_from(["copies", "dedup"]), st.sampled_from(["host", "direct"]), st.data())
@settings(max_examples=60)
def test_better_machines_are_never_slower(seed, dispatcher, paths, data):
    _, cell, counts_GE, topology, costs = _case(seed, 8, 4, dispatcher=dispatcher, paths=paths)
    name = data.draw(st.sampled_from([*vars(LINKS), "gemm_flops_per_s", "attention_flops_per_s", "memory_bytes_per_s"]))
    factor = data.draw(st.floats(1.0, 100.0))
    slow = price_cell(cell, counts_GE, topology, costs)
    if name in vars(LINKS):
        factor = 1 / factor if name.endswith("latency_s") else factor
        topology = replace(topology, links=replace(LINKS, **{name: getattr(LINKS, name) * factor}))
    else:
        costs = replace(costs, hardware=replace(costs.hardware, **{name: getattr(costs.hardware, name) * factor}))
    fast = price_cell(cell, counts_GE, topology, costs)
    # What is exposed may grow as the rest shrinks, its sum with the rest may not.
    assert (fast.parts_SP.sum(axis=1) <= slow.parts_SP.sum(axis=1) * (1 + 1e-12)).all()


def test_deals_use_each_host_as_often_as_the_assignment_says():
    for seed in range(20):
        routes, cell, counts_GE, topology, _ = _case(seed, 8, 2, slots=3, top_k=3)
        assignment = CellHosts.of(cell, counts_GE)
        host_TK = assign_picks(assignment, routes, topology.ranks_per_node)
        assert (assignment.expert_H[host_TK] == routes.ids_TK).all()
        source_T = np.repeat(np.arange(8), np.diff(routes.offsets))
        used_HG = np.zeros_like(assignment.tokens_HG)
        np.add.at(used_HG, (host_TK, source_T[:, None]), 1)
        np.testing.assert_array_equal(used_HG, assignment.tokens_HG)


def test_routes_of_other_counts_are_refused():
    routes, cell, counts_GE, topology, costs = _case(3, 8, 4)
    with pytest.raises(CountsError, match=r"hosts.*\d+.*expert 0.*0"):
        price_tokens(cell, counts_GE + 1, topology, costs, routes=routes)
    with pytest.raises(CountsError, match=r"8 source.*routes 4"):
        price_tokens(cell, counts_GE, topology, costs, routes=_routes(0, 4, 8, 2))


@pytest.mark.parametrize("name", ["G16", "G32", "G64"])
def test_the_estimate_is_near_the_count_on_generated_routes(name):
    """Under the homes alone, where real picks are spread most."""
    workload = replace(WORKLOADS[name], num_micro_steps=1, num_layers=1, mean_length=300)
    step = workload.draw(seed=1)
    ids_TK, rank_T = routes_of(step, 0, 0)
    order = np.argsort(rank_T, kind="stable")
    offsets = np.searchsorted(rank_T[order], np.arange(workload.num_ranks + 1)).astype(np.int64)
    routes = CellRoutes(ids_TK[order].astype(np.int16), offsets)
    topology = HARDWARE["h100"].topology(workload.num_ranks, 0)
    home_E = topology.contiguous_home_E(128)
    homes, counts_GE = CellPlan.homes_only(home_E, workload.num_ranks), step.counts()[0, 0]
    costs = CostModel(model=MODELS["qwen3-30b-a3b"], hardware=HARDWARE["h100"], dispatcher="dedup")
    pairs_GG = counts_GE.astype(np.int64) @ (home_E[:, None] == np.arange(workload.num_ranks))
    exact_4 = rows_of_tokens(homes, counts_GE, topology, costs, routes).sum(axis=0)
    estimate_4 = links.rows_sent(pairs_GG, costs.prices(topology)).sum(axis=0)
    assert 0.92 < estimate_4[links.CLUSTER_OUT] / exact_4[links.CLUSTER_OUT] < 1.005
    assert 0.89 < estimate_4[links.NODE_OUT] / exact_4[links.NODE_OUT] < 0.95
    exact = price_tokens(homes, counts_GE, topology, costs, routes=routes)
    assert 0.965 < price_cell(homes, counts_GE, topology, costs).seconds / exact.seconds < 1.005

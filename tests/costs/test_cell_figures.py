"""Figures of a cell against a slow oracle, the estimate of rows against counted ones, and what bandwidth may not do."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs import links
from foreroute.costs.links import served_loads
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.costs.pricing import least_seconds, parts_of_cells, slowest_attention, step_parts, work_of_cells
from foreroute.errors import PlanError
from foreroute.plan import Topology
from foreroute.plan.hosts import Hosts
from tests.costs.cost_oracle import oracle, price_cell, price_plan
from tests.plan.random_plans import LINKS, changed, random_counts, random_plan

SMALL = replace(MODELS["qwen3-30b-a3b"], top_k=2, num_experts=8)
COSTS = CostModel(model=SMALL, hardware=HARDWARE["h100"])


def _case(seed, num_ranks=4, ranks_per_node=2, top_k=2, **kinds):
    """A cell with hosts of no merit, its counts, and prices."""
    rng, topology = np.random.default_rng(seed), Topology(num_ranks, ranks_per_node, 2, LINKS)
    counts_GE = rng.multinomial(top_k * rng.integers(0, 40, num_ranks), rng.dirichlet(np.full(8, 0.5)))
    cell = random_plan(counts_GE[None, None], topology, seed=seed).cell(0, 0)
    return cell, counts_GE, topology, replace(COSTS, model=replace(SMALL, top_k=top_k), **kinds)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(8, 2), (4, 4), (4, 1)])
def test_figures_equal_the_slow_oracle(num_ranks, ranks_per_node):
    for seed, dispatcher, paths in itertools.product(range(8), ("copies", "dedup"), ("host", "direct")):
        kinds = {"dispatcher": dispatcher, "paths": paths, "top_k": 1 + seed % 3}
        cell, counts_GE, topology, costs = _case(seed, num_ranks, ranks_per_node, **kinds)
        slots = ("layer", "shared")[seed // 2 % 2]
        parts_SP = price_cell(cell, counts_GE, topology, costs, slots)
        expected, rows = oracle(cell, counts_GE, topology, costs, slots)
        for parts_P, pass_name in zip(parts_SP, ("recompute", "update"), strict=True):
            assert parts_P.tolist() == pytest.approx(list(expected[pass_name].values()), rel=1e-12)
        hosts = Hosts.of_cells(cell.home_E[None], [cell])
        rows_G4 = work_of_cells(hosts, counts_GE[None, None], costs.prices(topology)).rows_MLG4[0, 0]
        for link, direction in itertools.product(("cluster", "node"), ("out", "in")):
            by_hand = [rows.get((link, direction, g), 0) for g in range(num_ranks)]
            assert rows_G4[:, getattr(links, f"{link}_{direction}".upper())] == pytest.approx(by_hand, rel=1e-12)


def test_the_estimate_of_deduplicated_rows_is_near_the_count_of_routes():
    """Under the homes alone: each token to a node once, and there to a rank once."""
    rng, topology, cluster, node = np.random.default_rng(1), HARDWARE["h100"].topology(16, 0), 0, 0
    width, home_E, rank_T = topology.ranks_per_node, topology.contiguous_home_E(128), np.arange(8000) % 16
    ids_TK = np.argsort(rng.gumbel(size=(8000, 128)) + rng.normal(size=128), axis=1)[:, -8:]
    counts_MLGE = np.zeros((1, 1, 16, 128), int)
    np.add.at(counts_MLGE[0, 0], (rank_T[:, None], ids_TK), 1)
    for source, ranks in zip(rank_T.tolist(), home_E[ids_TK].tolist(), strict=True):
        for there in {rank // width for rank in ranks}:
            enters = source if there == source // width else there * width + source % width
            cluster += enters != source
            node += sum(rank // width == there and rank != enters for rank in set(ranks))
    costs = replace(COSTS, model=MODELS["qwen3-30b-a3b"], dispatcher="dedup")
    hosts = Hosts.with_room(home_E[None], 1, 16, 0)
    estimate_4 = work_of_cells(hosts, counts_MLGE, costs.prices(topology)).rows_MLG4.sum(axis=(0, 1, 2))
    assert 0.997 < estimate_4[links.CLUSTER_OUT] / cluster < 1
    assert 0.95 < estimate_4[links.NODE_OUT] / node < 0.97


COUNTS = random_counts(0, (3, 2, 4, 8)).astype(np.int32)
TOPOLOGY = Topology(4, 2, 2, LINKS)
PLAN = random_plan(COUNTS, TOPOLOGY, seed=1)
PRICES = COSTS.prices(TOPOLOGY)


def hosts_with(name, place, value):
    return changed(PLAN, name, place, value).hosts


UNFIT = {
    "a rank below 0": (hosts_with("rank_R", 1, -1), "rank_R.*-1 to"),
    "an expert that is not there": (hosts_with("expert_R", 0, 8), "expert_R.*8.*0 to 7"),
    "a home that is not there": (hosts_with("home_LE", (1, 3), 9), "home_LE.*9.*0 to 3"),
    "offsets that go back": (hosts_with("offsets", 2, 0), "offsets"),
    "offsets of fewer cells": (PLAN.hosts._replace(offsets=PLAN.hosts.offsets[:-1]), "offsets are 6.*expected 7"),
    "homes of fewer layers": (PLAN.hosts._replace(home_LE=PLAN.hosts.home_LE[:1]), r"home_LE.*\[1, 8\].*\[2, 8\]"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_hosts_that_do_not_fit_are_refused_by_every_door(name):
    hosts, message = UNFIT[name]
    attention_ML2 = slowest_attention(COUNTS, COSTS)
    for door in (
        lambda: served_loads(hosts, COUNTS, 2),
        lambda: step_parts(hosts, COUNTS, TOPOLOGY, COSTS),
        lambda: parts_of_cells(hosts, COUNTS, attention_ML2, PRICES),
        lambda: work_of_cells(hosts, COUNTS, PRICES),
    ):
        with pytest.raises(PlanError, match=message):
            door()


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


def test_a_step_is_the_sum_of_its_cells():
    counts = np.random.default_rng(0).integers(0, 40, (2, 3, 4, 8), dtype=np.int32)
    hosts = random_plan(counts, TOPOLOGY, seed=1).hosts
    cells = [price_cell(hosts.cell(m, layer), counts[m, layer], TOPOLOGY, COSTS) for m, layer in np.ndindex(2, 3)]
    np.testing.assert_allclose(step_parts(hosts, counts, TOPOLOGY, COSTS), sum(cells), rtol=1e-12)

"""Figures of a cell against a slow oracle, the estimate of rows against counted ones, and what bandwidth may not do."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.costs import links
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.costs.pricing import step_parts, work_of_cells
from foreroute.plan import Topology
from foreroute.plan.hosts import Hosts
from foreroute.simulate.workload import WORKLOADS
from tests.costs.cost_oracle import oracle, price_cell
from tests.plan.random_plans import LINKS, random_plan
from tests.simulate.drawn_routes import routes_of

SMALL = replace(MODELS["qwen3-30b-a3b"], top_k=2, num_experts=8)
COSTS = CostModel(model=SMALL, hardware=HARDWARE["h100"])


def _case(seed, num_ranks=4, ranks_per_node=2, top_k=2, **kinds):
    """A cell with hosts of no merit, its counts, and prices."""
    rng, topology = np.random.default_rng(seed), Topology(num_ranks, ranks_per_node, 2, LINKS)
    counts_GE = rng.multinomial(top_k * rng.integers(0, 40, num_ranks), rng.dirichlet(np.full(8, 0.5)))
    cell = random_plan(counts_GE[None, None], topology, seed=seed).cell(0, 0)
    return cell, counts_GE, topology, replace(COSTS, model=replace(SMALL, top_k=top_k), **kinds)


def test_a_step_is_the_sum_of_its_cells():
    topology = Topology(4, 2, 2, LINKS)
    counts = np.random.default_rng(0).integers(0, 40, (2, 3, 4, 8), dtype=np.int32)
    hosts = random_plan(counts, topology, seed=1).hosts
    cells = [price_cell(hosts.cell(m, layer), counts[m, layer], topology, COSTS) for m, layer in np.ndindex(2, 3)]
    np.testing.assert_allclose(step_parts(hosts, counts, topology, COSTS), sum(cells), rtol=1e-12)


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


@given(st.integers(0, 10_000), st.sampled_from(["copies", "dedup"]), st.sampled_from(["host", "direct"]), st.data())
@settings(max_examples=60)
def test_better_machines_are_never_slower(seed, dispatcher, paths, data):
    cell, counts_GE, topology, costs = _case(seed, 8, 4, dispatcher=dispatcher, paths=paths)
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
    assert (fast.sum(axis=1) <= slow.sum(axis=1) * (1 + 1e-12)).all()


def test_the_estimate_is_near_the_count_on_generated_routes():
    """Under the homes alone, where real picks are spread most: each token to a node once, and there to a rank once."""
    workload = replace(WORKLOADS["G16"], num_micro_steps=1, num_layers=1, mean_length=60)
    ids_TK, rank_T = routes_of(workload.draw(seed=1), 0, 0)
    topology, cluster, node = HARDWARE["h100"].topology(16, 0), 0, 0
    width, home_E = topology.ranks_per_node, topology.contiguous_home_E(128)
    counts_MLGE = np.zeros((1, 1, 16, 128), int)
    np.add.at(counts_MLGE[0, 0], (rank_T[:, None], ids_TK), 1)
    for source, ranks in zip(rank_T.tolist(), home_E[ids_TK].tolist(), strict=True):
        for there in {rank // width for rank in ranks}:
            enters = source if there == source // width else there * width + source % width
            cluster += enters != source
            node += sum(rank // width == there and rank != enters for rank in set(ranks))
    costs = CostModel(model=MODELS["qwen3-30b-a3b"], hardware=HARDWARE["h100"], dispatcher="dedup")
    hosts = Hosts.with_room(home_E[None], 1, 16, 0)
    estimate_4 = work_of_cells(hosts, counts_MLGE, costs.prices(topology)).rows_MLG4.sum(axis=(0, 1, 2))
    assert 0.92 < estimate_4[links.CLUSTER_OUT] / cluster < 1.005
    assert 0.89 < estimate_4[links.NODE_OUT] / node < 0.95

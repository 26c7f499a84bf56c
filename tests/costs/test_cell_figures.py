"""Figures of a cell against a slow oracle, the estimate of rows against counted ones, and what bandwidth may not do."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs import links
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.costs.pricing import work_of_cells
from foreroute.plan import Topology
from foreroute.plan.hosts import Hosts
from tests.costs.cost_oracle import oracle, price_cell
from tests.plan.random_plans import LINKS, random_plan

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

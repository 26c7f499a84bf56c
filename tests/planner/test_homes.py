"""Home placement against every placement of small instances, and against its own limits."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.plan import Topology
from foreroute.planner.homes import place_homes
from tests.plan.random_plans import LINKS


def topology(num_ranks, ranks_per_node):
    return Topology(num_ranks, ranks_per_node, 2, LINKS)


def surplus(counts_MGE, home_E, topo):
    """Twice the ranks' surplus over the mean (rounded down) plus the nodes', in Python's own integers."""
    total = 0
    for loads_E in counts_MGE.sum(axis=1).tolist():
        for weight, places, size in ((2, topo.num_ranks, 1), (1, topo.num_nodes, topo.ranks_per_node)):
            held = [0] * places
            for load, home in zip(loads_E, home_E, strict=True):
                held[int(home) // size] += load
            total += weight * sum(max(0, h - sum(loads_E) // places) for h in held)
    return total


def exchanges(home_E, start_E, max_moves):
    """Every placement that one exchange within the budget makes."""
    for e, f in combinations(range(len(home_E)), 2):
        swapped = home_E.copy()
        swapped[[e, f]] = swapped[[f, e]]
        if (swapped != start_E).sum() <= max_moves:
            yield swapped


def every_placement(start_E, max_moves):
    return {p for p in set(permutations(start_E)) if sum(x != y for x, y in zip(p, start_E, strict=True)) <= max_moves}


@pytest.mark.parametrize("max_moves", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 2), (4, 4), (4, 2), (2, 1)])
def test_no_exchange_improves_a_placement_and_it_is_near_the_best_of_all(num_ranks, ranks_per_node, max_moves):
    rng = np.random.default_rng([num_ranks, ranks_per_node, max_moves])
    topo, found, least, before = topology(num_ranks, ranks_per_node), 0, 0, 0
    for _ in range(3):
        counts = (rng.pareto(1.2, (3, 1, num_ranks, 8)) * 50).astype(np.int64)
        start = rng.permutation(np.repeat(np.arange(num_ranks), 8 // num_ranks))
        placed = place_homes(counts, topo, [start], max_moves=max_moves)[0]
        reached = surplus(counts[:, 0], placed, topo)
        assert all(surplus(counts[:, 0], p, topo) >= reached for p in exchanges(placed, start, max_moves))
        best = min(surplus(counts[:, 0], p, topo) for p in every_placement(start.tolist(), max_moves))
        if max_moves <= 2:  # one exchange, which was the best
            assert reached == best
        found, least, before = found + reached, least + best, before + surplus(counts[:, 0], start, topo)
    # a local optimum: most of what any placement saves
    assert before - found >= 0.85 * (before - least)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 4),
    per_rank=st.integers(1, 4),
    micro_steps=st.integers(1, 20),
    max_moves=st.one_of(st.none(), st.integers(0, 12)),
    scale=st.sampled_from([1, 1000, 2**20]),
)
def test_no_placement_is_worse_or_breaks_its_limits(seed, nodes, per_node, per_rank, micro_steps, max_moves, scale):
    rng = np.random.default_rng(seed)
    topo = topology(nodes * per_node, per_node)
    num_experts = topo.num_ranks * per_rank
    counts = rng.integers(0, 4, (micro_steps, 2, topo.num_ranks, num_experts)) * scale
    counts[rng.random(micro_steps) < 0.2] = 0
    start = rng.permuted(np.tile(np.repeat(np.arange(topo.num_ranks), per_rank), (2, 1)), axis=1)
    before = start.copy()
    placed, again = (place_homes(counts, topo, start, max_moves=max_moves, threads=threads) for threads in (1, 3))
    assert placed.dtype == np.int16
    assert np.array_equal(placed, again)
    assert np.array_equal(start, before)
    for layer in range(2):
        assert np.bincount(placed[layer], minlength=topo.num_ranks).tolist() == [per_rank] * topo.num_ranks
        assert max_moves is None or (placed[layer] != start[layer]).sum() <= max_moves
        assert surplus(counts[:, layer], placed[layer], topo) <= surplus(counts[:, layer], start[layer], topo)

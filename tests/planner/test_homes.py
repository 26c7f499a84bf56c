"""Homes, and sequences and homes for each other, against every placement of small instances, and their limits."""

from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.layout import pack_sequences
from foreroute.plan import Topology
from foreroute.planner.homes import place_homes
from foreroute.planner.packed_homes import PackedSequences
from tests.layout.test_by_routes import drawn, slowest_of
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
        every = (p for p in set(permutations(start.tolist())) if (np.array(p) != start).sum() <= max_moves)
        best = min(surplus(counts[:, 0], p, topo) for p in every)
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


def step(seed, sequences, ranks, budget, **sizes):
    lengths, counts = drawn(seed, sequences, **sizes)
    packing = pack_sequences(lengths, ranks, budget)
    found = PackedSequences(packing=packing, lengths_S=lengths, counts_SLE=counts, token_budget=budget, square_cost=0.0)
    return found, np.tile(np.arange(counts.shape[2]) * ranks // counts.shape[2], (counts.shape[1], 1))


def slowest(packed, home_LE):
    """By the definition, in loops."""
    packing = packed.packing
    sizes = packing.num_micro_steps, packing.num_ranks, 1
    return slowest_of(packing.micro_step_S, packing.rank_S, packed.counts_SLE, home_LE, *sizes).sum()


@pytest.mark.parametrize("seed", range(6))
def test_homes_and_packing_of_a_few_sequences_are_near_the_best_of_all(seed):
    """Six sequences of one length in three micro-steps, and four experts of two layers, in every arrangement."""
    given, blocks_LE = step(seed, 6, 2, 20, layers=2, experts=4, longest=20, shortest=20)
    packed, home_LE = given.with_homes(topology(2, 2), blocks_LE)
    pairs = [np.isin(np.arange(4), chosen).astype(int) for chosen in combinations(range(4), 2) if 0 in chosen]
    groupings = [np.array(m) for m in product(range(3), repeat=6) if sorted(m) == [0, 0, 1, 1, 2, 2]]
    least = min(
        sum(least_of_layer(given.counts_SLE[:, layer], grouping, pairs) for layer in range(2)) for grouping in groupings
    )
    assert least <= slowest(packed, home_LE) <= 1.04 * least
    assert slowest(packed, home_LE) < slowest(given, blocks_LE)


def least_of_layer(counts_SE, grouping, homes):
    loads_ME = np.stack([counts_SE[grouping == m].sum(axis=0) for m in range(3)])
    return min(np.maximum(loads_ME @ home_E, loads_ME @ (1 - home_E)).sum() for home_E in homes)


@pytest.mark.parametrize(("seed", "max_moves"), [(0, None), (1, None), (2, 4), (3, 2), (4, 0)])
def test_what_is_found_can_be_run_and_is_no_worse_than_packing_alone(seed, max_moves):
    given, blocks_LE = step(seed, 48, 4, 60)
    packed, home_LE = given.with_homes(topology(4, 2), blocks_LE, max_moves=max_moves)
    assert home_LE.dtype == np.int16
    assert all(np.bincount(home_E).tolist() == [2] * 4 for home_E in home_LE)
    moves = (home_LE != blocks_LE).sum(axis=1).max()
    assert moves <= (max_moves if max_moves is not None else 8)
    held = np.zeros((packed.packing.num_micro_steps, 4), int)
    np.add.at(held, (packed.packing.micro_step_S, packed.packing.rank_S), given.lengths_S)
    assert held.max() <= 60
    assert packed.packing.num_micro_steps == given.packing.num_micro_steps
    assert packed.packing.certificate.attention <= 1.005
    assert packed.packing.certificate.slowest == slowest(packed, home_LE)
    alone = given.packed_for(blocks_LE)
    assert slowest(alone, blocks_LE) <= slowest(given, blocks_LE)
    # the surplus of all ranks and nodes is what homes are placed by, which is not quite the slowest one
    assert slowest(packed, home_LE) <= 1.01 * slowest(alone, blocks_LE)
    if max_moves == 0:
        assert np.array_equal(packed.packing.micro_step_S, alone.packing.micro_step_S)

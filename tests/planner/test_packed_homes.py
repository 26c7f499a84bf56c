"""Sequences and homes that are made for each other, against every way to arrange a few, and what holds of any."""

from itertools import combinations, product

import numpy as np
import pytest

from foreroute.layout import pack_sequences
from foreroute.planner.packed_homes import PackedSequences
from tests.layout.test_by_routes import drawn, slowest_of
from tests.planner.test_homes import topology


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

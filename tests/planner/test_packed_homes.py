"""Sequences and homes that are made for each other, against every way to arrange a few, and what holds of any."""

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

"""Experts that change homes, expert by expert."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.ep import transfer
from foreroute.errors import PlanError
from tests.ep.transfer.plans import random_homes

seeds = st.integers(0, 10**6)


def rows_of(moves):
    return list(zip(*(array.tolist() for array in vars(moves).values()), strict=True))


def shards_of(home_E, num_ranks):
    return [[e for e in range(len(home_E)) if home_E[e] == rank] for rank in range(num_ranks)]


@given(seeds, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60)
def test_home_moves_turn_old_shards_into_new_ones(seed, ranks, per_rank):
    rng = np.random.default_rng(seed)
    before_E, after_E = (random_homes(rng, ranks * per_rank, ranks) for _ in range(2))
    shards, wanted = shards_of(before_E, ranks), shards_of(after_E, ranks)
    new = [list(shard) for shard in shards]
    for expert, source, source_row, target, target_row in rows_of(transfer.shard_moves(before_E, after_E)):
        assert (source, source_row) != (target, target_row)
        assert shards[source][source_row] == expert
        new[target][target_row] = expert
    assert new == wanted


def test_a_change_of_homes_keeps_the_size_of_every_shard():
    with pytest.raises(PlanError, match=r"ranks hold \[2, 2\] experts before and \[3, 1\] after"):
        transfer.shard_moves(np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1]))

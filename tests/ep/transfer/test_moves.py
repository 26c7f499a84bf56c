"""Moves against what a plan says, expert by expert, and rounds against the bound that they must meet."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.ep import transfer
from foreroute.ep.transfer.moves import held_after, rounds
from foreroute.errors import PlanError
from tests.ep.transfer.plans import least_fetches_L, random_homes, random_plan

seeds = st.integers(0, 10**6)


def rows_of(moves):
    return list(zip(*(array.tolist() for array in vars(moves).values()), strict=True))


def shards_of(home_E, num_ranks):
    return [[e for e in range(len(home_E)) if home_E[e] == rank] for rank in range(num_ranks)]


@given(seeds, st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_replicas_are_fetched_from_home_and_their_gradients_return_to_it(seed, ranks, per_rank):
    plan = random_plan(seed, ranks=ranks, experts=ranks * per_rank, slots=3, micro_steps=1, layers=1)
    cell = plan.cell(0, 0)
    shards = shards_of(cell.home_E, ranks)
    served = sorted(zip(cell.rank_R.tolist(), cell.slot_R.tolist(), cell.expert_R.tolist(), strict=True))
    on_rank = [[e for r, _, e in served if r == rank] for rank in range(ranks)]
    fetches, returns = rows_of(transfer.replica_moves(cell)), rows_of(transfer.gradient_moves(cell))
    assert [(target, slot, expert) for expert, _, _, target, slot in fetches] == served
    assert all(shards[source][row] == expert for expert, source, row, _, _ in fetches)
    assert sorted(returns) == sorted(
        (e, r, on_rank[r].index(e), int(cell.home_E[e]), shards[cell.home_E[e]].index(e)) for r, _, e in served
    )
    order = [(target, row, source) for _, source, _, target, row in returns]
    assert order == sorted(order)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_what_slots_hold_is_not_fetched_again(seed):
    plan = random_plan(seed, ranks=4, micro_steps=5, layers=2, slots=3, keep=0.7)
    fetched_L = np.zeros(2, np.int64)
    for layer in range(2):
        held_GP = np.full((4, 3), -1)
        for micro_step in range(5):
            cell = plan.cell(micro_step, layer)
            moves = transfer.replica_moves(cell, held_GP)
            wanted = sorted(zip(cell.rank_R[cell.fetched_R], cell.slot_R[cell.fetched_R], strict=True))
            assert list(zip(moves.target_V, moves.target_row_V, strict=True)) == wanted
            fetched_L[layer] += len(moves)
            held_GP = held_after(moves, held_GP)
            assert (held_GP[cell.rank_R, cell.slot_R] == cell.expert_R).all()
    assert fetched_L.tolist() == least_fetches_L(plan).tolist()


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_rounds_are_as_few_as_the_busiest_end_allows(edges):
    source_V, target_V = np.array(edges, np.int64).reshape(-1, 2).T
    round_V = rounds(source_V, target_V)
    assert len(round_V) == len(edges)
    for end_V in (source_V, target_V):
        taken = list(zip(end_V.tolist(), round_V.tolist(), strict=True))
        assert len(set(taken)) == len(taken)
    busiest = max((np.bincount(v).max() for v in (source_V, target_V) if len(v)), default=0)
    assert set(round_V.tolist()) <= set(range(busiest))


@given(seeds, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
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

"""Packing, and padded batches, against loops."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreroute.errors import ConfigError, LayoutError
from foreroute.layout import pack_sequences
from foreroute.layout.packing import padded_batches
from tests.layout import layout_oracle


def cost(lengths, square):
    lengths = np.asarray(lengths, float)
    return lengths + square * lengths**2


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    num_ranks=st.integers(1, 4),
    spare=st.integers(0, 60),
    square=st.sampled_from([0.0, 0.05]),
)
@example(lengths=[1, 1, 0, 0], num_ranks=4, spare=1, square=0.0)
@example(lengths=[2, 1], num_ranks=1, spare=1, square=0.0)  # they fill the place
def test_the_longest_goes_first_to_the_lightest_place_with_room(lengths, num_ranks, spare, square):
    """Against the rule in loops over all places, and as many micro-steps as the first number that works."""
    budget = max(lengths) + spare
    packed = pack_sequences(lengths, num_ranks, budget, square_cost=square)
    executed = [packed.sequences(m, g) for m in range(packed.num_micro_steps) for g in range(num_ranks)]
    assert sorted(np.concatenate(executed).tolist()) == list(range(len(lengths)))
    works = layout_oracle.dealt(lengths, cost(lengths, square), budget, packed.num_micro_steps * num_ranks)
    assert (packed.micro_step_S * num_ranks + packed.rank_S).tolist() == works
    fewer = (packed.num_micro_steps - 1) * num_ranks
    assert fewer == 0 or layout_oracle.dealt(lengths, cost(lengths, square), budget, fewer) is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"token_budget": 8}, LayoutError, "sequence 1 has 9 tokens and the token budget is 8; .* at least 9, or cut"),
        ({"num_ranks": 0}, LayoutError, "number of ranks is 0; expected a whole number from 1"),
        ({"lengths": []}, LayoutError, "no sequence to pack"),
        ({"lengths": [-1]}, LayoutError, "expected 0 or more"),
        ({"token_budget": 20.5}, LayoutError, "the token budget is 20.5"),
        ({"square_cost": -1.0}, ConfigError, "square_cost is -1.0"),
    ],
)
def test_impossible_packings_are_refused(change, error, message):
    asked = {"lengths": [7, 9, 8], "num_ranks": 2, "token_budget": 20} | change
    with pytest.raises(error, match=message):
        pack_sequences(**asked)


@pytest.mark.parametrize("seed", range(100))
def test_padded_batches_equal_the_loop(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 20, int(rng.integers(1, 30))).tolist()
    budget = max(lengths) + int(rng.integers(0, 60))
    batches = padded_batches(lengths, budget)
    assert [batch.tolist() for batch in batches] == layout_oracle.greedy_padded_batches(lengths, budget)


def test_ranks_can_agree_on_a_number_of_padded_batches_and_nothing_makes_none():
    batches = padded_batches([4, 4, 4, 4, 1], 100, min_count=3)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2], [3, 4]]
    assert len(padded_batches([4] * 5, 100, min_count=5)) == 5
    assert padded_batches([], 10) == []
    assert [batch.tolist() for batch in padded_batches([0, 0], 0)] == [[0, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, 9], "token_budget": 8}, "sequence 1 has 9 tokens and the token budget is 8; raise the budget"),
        ({"lengths": [7], "token_budget": 7, "min_count": 2}, "1 sequences cannot make 2"),
        ({"lengths": [-1], "token_budget": 7}, "expected 0 or more"),
    ],
)
def test_impossible_padded_batches_are_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        padded_batches(**arguments)

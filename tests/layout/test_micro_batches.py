"""Micro-batches against loops, their budget, and the permutation back."""

import numpy as np
import pytest

from foreroute import layout
from foreroute.errors import LayoutError
from foreroute.trace import count_assignments
from tests.layout import layout_oracle
from tests.traces import random_trace


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("padded", [False, True])
def test_in_order_equals_the_loop(seed, padded):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 20, int(rng.integers(1, 30)))
    align = int(rng.integers(1, 5))
    costs = [-(-int(n) // align) * align for n in lengths]
    budget = max(costs) + int(rng.integers(0, 60))
    micro = layout.by_token_budget(lengths, budget, padded=padded, align=align)
    assert [m.tolist() for m in micro] == layout_oracle.greedy_micro_batches(costs, budget, padded=padded)


@pytest.mark.parametrize("seed", range(100))
def test_balanced_deals_every_sequence_once_within_the_budget(seed):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(3, 1, int(rng.integers(1, 200))).astype(int), 100)
    budget = int(rng.integers(max(100, lengths.max()), 400))
    fewest = int(rng.integers(0, len(lengths) + 1))
    micro = layout.by_token_budget(lengths, budget, balanced=True, min_count=fewest)
    loads = [int(lengths[m].sum()) for m in micro]
    assert sorted(micro.order_S.tolist()) == list(range(len(lengths)))
    assert max(loads) <= budget
    assert len(micro) >= max(fewest, 1)
    assert all(len(m) and m.tolist() == sorted(m) for m in micro)
    assert max(loads) - min(loads) <= lengths.max(initial=0)


def test_balanced_is_even_where_the_order_of_the_batch_is_not():
    lengths = [8, 1, 1, 1, 1, 8, 2, 2]
    assert [m.tolist() for m in layout.by_token_budget(lengths, 12)] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    balanced = layout.by_token_budget(lengths, 12, balanced=True)
    assert [m.tolist() for m in balanced] == [[0, 1, 3, 6], [2, 4, 5, 7]]
    assert repr(balanced) == "MicroBatches(2 of 8 sequences)"


@pytest.mark.parametrize("balanced", [False, True])
def test_results_return_to_the_order_of_the_batch(balanced):
    lengths = np.random.default_rng(0).integers(1, 20, 40)
    micro = layout.by_token_budget(lengths, 50, balanced=balanced)
    executed = np.concatenate([lengths[m] for m in micro])
    assert executed[micro.restore_S].tolist() == lengths.tolist()
    assert all(micro.micro_step_S[s] == m for m in range(len(micro)) for s in micro.sequences(m))


def test_ranks_can_agree_on_a_number_of_micro_batches():
    micro = layout.by_token_budget([4, 4, 4, 4, 1], 100, min_count=3)
    assert [m.tolist() for m in micro] == [[0, 1], [2], [3, 4]]
    assert len(layout.by_token_budget([4] * 5, 100, min_count=5)) == 5
    assert len(layout.by_token_budget([4] * 5, 100, balanced=True, min_count=4)) == 4


def test_micro_steps_feed_counts():
    trace = random_trace(5)
    micro = layout.by_token_budget(trace.lengths, int(trace.lengths.max()), balanced=True)
    assert count_assignments(trace, micro.micro_step_S).shape[0] == len(micro)


def test_nothing_makes_no_micro_batch():
    assert list(layout.by_token_budget([], 10)) == []
    assert [m.tolist() for m in layout.by_token_budget([0, 0], 0, balanced=True)] == [[0, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, 9], "budget": 8}, "sequence 1 needs 9 tokens and a micro-batch may hold 8; raise the budget"),
        ({"lengths": [7], "budget": 7, "align": 4}, "needs 8 tokens"),
        ({"lengths": [7], "budget": 7, "min_count": 2}, "1 sequences cannot make 2"),
        ({"lengths": [-1], "budget": 7}, "expected 0 or more"),
        ({"lengths": [[1]], "budget": 7}, "one integer per sequence"),
        ({"lengths": [1], "budget": 7, "align": 0}, "align is 0"),
        ({"lengths": [2.9], "budget": 7}, "one integer per sequence"),
        ({"lengths": [2**63 - 1, 2**63 - 1, 7], "budget": 7}, "add up to"),
        ({"lengths": [3], "budget": 7, "align": 2**62}, "align is"),
        ({"lengths": [1], "budget": 7, "balanced": True, "padded": True}, "drop `balanced` or `padded`"),
    ],
)
def test_impossible_budgets_are_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        layout.by_token_budget(**arguments)

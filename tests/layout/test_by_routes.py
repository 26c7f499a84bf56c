"""Packing by routes against all packings of a few sequences, and what holds of any."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.errors import ConfigError, LayoutError
from foreroute.layout import pack_sequences
from foreroute.layout.by_routes import MOST_DEARER


def drawn(seed, sequences, layers=3, experts=8, longest=30, shortest=1):
    """Lengths, and counts of tokens that pick one to three experts, each sequence its own."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, sequences)
    counts = np.zeros((sequences, layers, experts), np.int64)
    for s, length in enumerate(lengths):
        for layer in range(layers):
            share = rng.dirichlet(np.full(experts, 0.5))
            counts[s, layer] = np.minimum(rng.multinomial(3 * length, share), length)
    return lengths, counts


def homes_of(seed, layers, experts, ranks):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(np.arange(experts) % ranks) for _ in range(layers)])


def slowest_of(micro_step_S, rank_S, counts, homes, micro_steps, ranks, groups):
    """By the definition, in loops: [group][micro-step], the sum over layers of the slowest rank."""
    in_group = ranks // groups
    sums = np.zeros((groups, micro_steps), int)
    for group, m in np.ndindex(groups, micro_steps):
        there = np.flatnonzero((micro_step_S == m) & (rank_S // in_group == group))
        for layer in range(counts.shape[1]):
            loads = [0] * in_group
            for s in there:
                for expert, count in enumerate(counts[s, layer]):
                    loads[homes[layer][expert]] += int(count)
            sums[group, m] += max(loads)
    return sums


def slowest_of_groups(*packed):
    """Of each group, the sum over its micro-steps."""
    return slowest_of(*packed).sum(axis=1)


def held(packing, values_S):
    total = np.zeros((packing.num_micro_steps, packing.num_ranks))
    np.add.at(total, (packing.micro_step_S, packing.rank_S), values_S)
    return total


@pytest.mark.parametrize(("groups", "seed"), [(1, 0), (1, 1), (1, 2), (2, 3), (2, 4)])
def test_no_packing_of_a_few_sequences_passes_the_bound(groups, seed):
    """All packings, whatever their tokens: the least is at or above the bound, and the packing near the least."""
    lengths, counts = drawn(seed, 6, layers=2, experts=4, shortest=20)
    ranks, homes = 2 * groups, homes_of(seed, 2, 4, 2)
    budget = max(int(lengths.max()), int(lengths.sum()) // (ranks + 1))
    packed = pack_sequences(lengths, ranks, budget, counts=counts, homes=homes, groups=groups)
    num = packed.num_micro_steps
    assert num >= 2
    bins, least = num * groups, []
    # experts take what a group's ranks send, so that the rank within a group does not matter
    for chosen in product(range(bins), repeat=len(lengths)):
        micro_step_S, rank_S = np.array(chosen) // groups, np.array(chosen) % groups * 2
        least.append(max(slowest_of_groups(micro_step_S, rank_S, counts, homes, num, ranks, groups)))
    assert packed.certificate.bound <= min(least) <= packed.certificate.slowest
    # all in one micro-step reach the bound of one group, whatever the budget says
    assert groups > 1 or packed.certificate.bound == min(least)


@pytest.mark.parametrize("seed", range(4))
def test_a_few_sequences_are_packed_as_well_as_any_exchange_can(seed):
    """Against all arrangements that hold as many sequences of equal length in every place."""
    _, counts = drawn(seed, 6, layers=2, experts=4, shortest=20, longest=20)
    homes, lengths = homes_of(seed, 2, 4, 2), np.full(6, 20)
    packed = pack_sequences(lengths, 2, 20, counts=counts, homes=homes)
    assert packed.num_micro_steps == 3
    least = min(
        sum(slowest_of_groups(np.array(chosen), np.zeros(6, int), counts, homes, 3, 2, 1))
        for chosen in product(range(3), repeat=6)
        if set(Counter(chosen).values()) == {2}
    )
    assert packed.certificate.slowest <= 1.02 * least


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sequences=st.integers(1, 40),
    layers=st.sampled_from([1, 3, 8, 9]),
    ranks=st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)]),
    spare=st.integers(0, 60),
    square=st.sampled_from([0.0, 0.05]),
    shortest=st.integers(0, 1),
)
def test_places_keep_their_budgets_and_the_certificate_says_what_they_hold(
    seed, sequences, layers, ranks, spare, square, shortest
):
    num_ranks, groups = ranks
    lengths, counts = drawn(seed, sequences, layers, shortest=shortest)
    homes = homes_of(seed, layers, 8, num_ranks // groups)
    budget = int(lengths.max()) + spare
    by_length = pack_sequences(lengths, num_ranks, budget, square_cost=square)
    packed = pack_sequences(lengths, num_ranks, budget, square_cost=square, counts=counts, homes=homes, groups=groups)
    found, num = packed.certificate, packed.num_micro_steps
    # every sequence once, in as many micro-steps, within the budget
    assert num == by_length.num_micro_steps
    assert packed.micro_step_S.dtype == packed.rank_S.dtype == np.int32
    assert len(packed.micro_step_S) == sequences
    assert 0 <= packed.micro_step_S.min() <= packed.micro_step_S.max() < num
    assert 0 <= packed.rank_S.min() <= packed.rank_S.max() < num_ranks
    assert held(packed, lengths).max() <= budget
    # attention waits for the dearest rank of a group's micro-step
    in_group = num_ranks // groups
    cost = lengths + square * lengths.astype(float) ** 2
    dearest = [held(each, cost).reshape(num, groups, in_group).max(axis=2).sum() for each in (by_length, packed)]
    assert dearest[1] <= (1 + MOST_DEARER) * dearest[0] + 1e-6
    # who has most tokens sends most rows, however little attention they take
    longest = [held(each, lengths).reshape(num, groups, in_group).max(axis=2).sum() for each in (by_length, packed)]
    assert longest[1] <= (1 + MOST_DEARER) * longest[0]
    assert found.attention == pytest.approx(dearest[1] / dearest[0] if dearest[0] else 1.0)
    # the certificate is of this packing
    before, after = (
        slowest_of(each.micro_step_S, each.rank_S, counts, homes, num, num_ranks, groups)
        for each in (by_length, packed)
    )
    assert (found.by_length, found.slowest) == (before.sum(axis=1).max(), after.sum(axis=1).max())
    assert found.slowest >= found.bound
    assert found.slowest <= found.by_length
    if found.slowest < found.by_length:
        # no two micro-steps of the slowest group and of another are better exchanged
        sums = after.sum(axis=1)
        slowest = sums.argmax()
        for other, m, n in np.ndindex(groups, num, num):
            less = after[slowest, m] - after[other, n]
            assert other == slowest or max(sums[slowest] - less, sums[other] + less) >= sums[slowest]
    again = pack_sequences(
        lengths, num_ranks, budget, square_cost=square, counts=counts.astype(np.int32), homes=homes, groups=groups
    )
    assert np.array_equal(again.micro_step_S, packed.micro_step_S)
    assert np.array_equal(again.rank_S, packed.rank_S)


def test_sequences_that_want_one_rank_each_are_mixed():
    """Two kinds of sequences, each with its own half of the experts: by length kinds meet by chance, by routes not."""
    kind = np.array([0] * 8 + [1] * 8)
    counts = np.zeros((16, 8, 8), np.int64)
    for half in range(2):
        counts[kind == half, :, 4 * half : 4 * half + 4] = 10
    lengths = np.full(16, 20)
    packed = pack_sequences(lengths, 2, 20, counts=counts)
    assert packed.certificate.over_bound == 1.0
    assert packed.certificate.by_length == 2 * packed.certificate.slowest
    for m in range(8):
        assert set(kind[packed.micro_step_S == m]) == {0, 1}


def test_a_search_that_is_cut_short_makes_nothing_worse(monkeypatch):
    """Cut while it still keeps what is worse: the packing by length is taken then."""
    monkeypatch.setattr("foreroute.layout.by_routes.WORK", 300)
    for seed in range(80, 100):
        lengths, counts = drawn(seed, 60, layers=8)
        found = pack_sequences(lengths, 2, 60, counts=counts).certificate
        assert found.slowest <= found.by_length


@pytest.mark.parametrize("seed", range(5))
def test_places_that_are_full_stay_within_the_budget(seed):
    """Budgets that barely hold the step: what half a percent more attention would allow, tokens do not."""
    lengths, counts = drawn(seed, 60, layers=8, shortest=300, longest=1000)
    budget = int(lengths.sum()) // 8
    while pack_sequences(lengths, 2, budget).num_micro_steps > 4:
        budget += 1
    packed = pack_sequences(lengths, 2, budget, counts=counts)
    assert packed.certificate.slowest < packed.certificate.by_length
    assert held(packed, lengths).max() <= budget


def test_without_counts_nothing_is_exchanged():
    lengths, counts = drawn(0, 30)
    by_length = pack_sequences(lengths, 2, 60)
    assert by_length.certificate is None
    level = pack_sequences(lengths, 2, 60, counts=np.zeros_like(counts))
    assert np.array_equal(level.micro_step_S, by_length.micro_step_S)
    assert np.array_equal(level.rank_S, by_length.rank_S)
    assert (level.certificate.bound, level.certificate.over_bound) == (0, 1.0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"counts": np.ones((2, 1, 4), int)}, LayoutError, "counts.*3 sequences"),
        ({"counts": np.ones((3, 4), int)}, LayoutError, "counts.*3 sequences"),
        ({"counts": np.ones((3, 1, 4))}, LayoutError, "float64.*expected integers"),
        ({"counts": np.ones((3, 0, 4), int)}, LayoutError, "0 layers.*at least one"),
        ({"counts": np.full((3, 1, 4), 8)}, LayoutError, "sequence 0.*7 tokens"),
        ({"counts": np.full((3, 1, 4), -1)}, LayoutError, "sequence 0.*from -1"),
        ({"counts": np.ones((3, 1, 3), int)}, LayoutError, "3 experts.*pass homes"),
        ({"homes": [[0, 0, 1, 2]]}, LayoutError, "to 2.*0 to 1"),
        ({"homes": [[0, 0, -1, 1]]}, LayoutError, "from -1.*0 to 1"),
        ({"homes": [[0, 0, 1]]}, LayoutError, "homes.*layers and experts"),
        ({"homes": [[0.0, 0, 1, 1]]}, LayoutError, "float64.*expected integers"),
        ({"groups": 3}, LayoutError, "2 ranks.*3 equal"),
        ({"groups": 0}, LayoutError, "groups is 0"),
        ({"token_budget": 8}, LayoutError, "sequence 1.*budget is 8"),
        ({"counts": None, "homes": [[0, 0, 1, 1]]}, ConfigError, "homes.*counts"),
        ({"counts": None, "groups": 2}, ConfigError, "groups.*counts"),
        (
            {"lengths": [2**30] * 3, "token_budget": 2**31, "counts": np.full((3, 1, 4), 2**30)},
            LayoutError,
            "layer.*in parts",
        ),
    ],
)
def test_impossible_packings_by_routes_are_refused(change, error, message):
    asked = {"lengths": [7, 9, 8], "num_ranks": 2, "token_budget": 20, "counts": np.ones((3, 1, 4), int)} | change
    with pytest.raises(error, match=message):
        pack_sequences(**asked)

"""Packing by length and by routes: against loops, all packings of a few sequences, and what holds of any."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreroute.errors import ConfigError, LayoutError
from foreroute.layout import Packing, exchange_sequences, pack_sequences
from foreroute.layout.by_routes import MOST_DEARER
from foreroute.layout.packing import padded_batches
from tests.layout import layout_oracle


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


def held_by(packing, lengths, padded=False, square=0.0):
    """By the definition: [M][G], the tokens of every place with its padding, and what they cost."""
    tokens, costs = np.zeros((2, packing.num_micro_steps, packing.num_ranks))
    for m, rank in np.ndindex(*tokens.shape):
        of_place = [int(lengths[s]) for s in packing.sequences(m, rank)]
        if padded:
            of_place = [max(of_place)] * len(of_place) if of_place else []
        tokens[m, rank], costs[m, rank] = sum(of_place), sum(n + square * n**2 for n in of_place)
    return tokens, costs


def require_certificate(before, after, lengths, counts, homes, expert_ranks, *, groups=1, padded=False, square=0.0):
    """It says what a packing holds, and of each group's micro-step neither attention nor tokens grew by much.

    Returns the sums over layers of the slowest rank, [group][micro-step].
    """
    assert (after.num_micro_steps, after.num_ranks) == (before.num_micro_steps, before.num_ranks)
    assert after.micro_step_S.dtype == after.rank_S.dtype == np.int32
    sums, tokens, costs = [], [], []
    for each in (before, after):
        group_S = each.rank_S // (each.num_ranks // groups)
        sizes = each.num_micro_steps, groups * expert_ranks, groups
        sums.append(slowest_of(each.micro_step_S, group_S * expert_ranks, counts, homes, *sizes))
        for found, values in zip((tokens, costs), held_by(each, lengths, padded, square), strict=True):
            # attention waits for the dearest rank, and who has most tokens sends most rows
            found.append(values.reshape(each.num_micro_steps, groups, -1).max(axis=2).sum())
    assert tokens[1] <= (1 + MOST_DEARER) * tokens[0]
    assert costs[1] <= (1 + MOST_DEARER) * costs[0] + 1e-6
    found = after.certificate
    assert found.attention == pytest.approx(costs[1] / costs[0] if costs[0] else 1.0)
    assert (found.by_length, found.slowest) == tuple(each.sum(axis=1).max() for each in sums)
    assert found.bound <= found.slowest <= found.by_length
    return sums[1]


@pytest.mark.parametrize(("groups", "seed"), [(1, 0), (1, 1), (2, 3)])
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
        least.append(slowest_of(micro_step_S, rank_S, counts, homes, num, ranks, groups).sum(axis=1).max())
    assert packed.certificate.bound <= min(least) <= packed.certificate.slowest
    # all in one micro-step reach the bound of one group, whatever the budget says
    assert groups > 1 or packed.certificate.bound == min(least)


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
@example(seed=0, sequences=16, layers=1, ranks=(2, 1), spare=0, square=0.05, shortest=0)  # where tokens bind
def test_places_keep_their_budgets_and_the_certificate_says_what_they_hold(
    seed, sequences, layers, ranks, spare, square, shortest
):
    num_ranks, groups = ranks
    lengths, counts = drawn(seed, sequences, layers, shortest=shortest)
    homes = homes_of(seed, layers, 8, num_ranks // groups)
    budget = int(lengths.max()) + spare
    by_length = pack_sequences(lengths, num_ranks, budget, square_cost=square)
    asked = {"square_cost": square, "homes": homes, "groups": groups}
    packed = pack_sequences(lengths, num_ranks, budget, counts=counts, **asked)
    num, found = packed.num_micro_steps, packed.certificate
    # every sequence once, within the budget
    assert len(packed.micro_step_S) == sequences
    assert 0 <= packed.micro_step_S.min() <= packed.micro_step_S.max() < num
    assert 0 <= packed.rank_S.min() <= packed.rank_S.max() < num_ranks
    assert held_by(packed, lengths)[0].max() <= budget
    after = require_certificate(
        by_length, packed, lengths, counts, homes, num_ranks // groups, groups=groups, square=square
    )
    if found.slowest < found.by_length:
        # no two micro-steps of the slowest group and of another are better exchanged
        sums = after.sum(axis=1)
        slowest = sums.argmax()
        for other, m, n in np.ndindex(groups, num, num):
            less = after[slowest, m] - after[other, n]
            assert other == slowest or max(sums[slowest] - less, sums[other] + less) >= sums[slowest]
    again = pack_sequences(lengths, num_ranks, budget, counts=counts.astype(np.int32), **asked)
    assert np.array_equal(again.micro_step_S, packed.micro_step_S)
    assert np.array_equal(again.rank_S, packed.rank_S)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sequences=st.integers(0, 40),
    layers=st.sampled_from([1, 3, 9]),
    places=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    expert_ranks=st.integers(1, 4),
    longest=st.sampled_from([1, 3, 30]),
    padded=st.booleans(),
    spare=st.none() | st.integers(0, 40),
    square=st.sampled_from([0.0, 0.05]),
    keep_ranks=st.booleans(),
)
def test_sequences_are_exchanged_within_the_budget_and_on_their_own_rank_if_asked(
    seed, sequences, layers, places, expert_ranks, longest, padded, spare, square, keep_ranks
):
    micro_steps, ranks = places
    expert_ranks = expert_ranks if keep_ranks else ranks
    lengths, counts = drawn(seed, sequences, layers, longest=longest)
    homes = homes_of(seed, layers, 8, expert_ranks)
    rng = np.random.default_rng([seed, 1])  # a packing that nobody chose, with places that are empty
    steps, of_ranks = (rng.integers(0, size, sequences).astype(np.int32) for size in (micro_steps, ranks))
    before = Packing(steps, of_ranks, micro_steps, ranks)
    asked = {"homes": homes, "padded": padded, "square_cost": square, "keep_ranks": keep_ranks}
    most = held_by(before, lengths, padded)[0].max()
    if spare is not None:
        asked["token_budget"] = int(most) + spare
    after = exchange_sequences(before, lengths, counts, **asked)
    # every sequence once, and as many of them together, within the budget
    assert np.array_equal(after.rank_S, before.rank_S) or not keep_ranks
    sizes = [
        [[len(each.sequences(m, rank)) for m in range(micro_steps)] for rank in range(ranks)]
        for each in (before, after)
    ]
    if keep_ranks:
        assert [sorted(of_rank) for of_rank in sizes[0]] == [sorted(of_rank) for of_rank in sizes[1]]
    else:
        assert sizes[0] == sizes[1]
    assert held_by(after, lengths, padded)[0].max() <= most + (spare or 0)
    require_certificate(before, after, lengths, counts, homes, expert_ranks, padded=padded, square=square)
    nowhere = np.zeros(sequences, int)
    assert after.certificate.bound == slowest_of(nowhere, nowhere, counts, homes, 1, expert_ranks, 1).sum()
    again = exchange_sequences(before, lengths, counts.astype(np.int32), **asked)
    assert np.array_equal(again.micro_step_S, after.micro_step_S)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_few_sequences_are_exchanged_as_well_as_can_be(seed, padded):
    """Against all arrangements of two ranks with three micro-steps each that hold the budget and bound attention."""
    sizes = (2, 1, 1) if padded else (1, 1, 1)
    own, homes = sum(sizes), homes_of(seed, 2, 4, 2)
    lengths, counts = drawn(seed, 2 * own, layers=2, experts=4, shortest=18, longest=20)
    rank_S = np.repeat([0, 1], own).astype(np.int32)
    of_a_rank = [each for each in product(range(3), repeat=own) if sorted(Counter(each).values()) == sorted(sizes)]
    arrangements = [Packing(np.array(a + b, np.int32), rank_S, 3, 2) for a, b in product(of_a_rank, repeat=2)]
    before = arrangements[0]
    tokens = held_by(before, lengths, padded)[0]  # which attention goes by too
    budget, limit = int(tokens.max()), (1 + MOST_DEARER) * tokens.max(axis=1).sum()
    held = (held_by(each, lengths, padded)[0] for each in arrangements)
    least = min(
        slowest_of(each.micro_step_S, np.zeros(2 * own, int), counts, homes, 3, 2, 1).sum()
        for each, tokens in zip(arrangements, held, strict=True)
        if tokens.max() <= budget and tokens.max(axis=1).sum() <= limit
    )
    found = exchange_sequences(before, lengths, counts, homes=homes, padded=padded, token_budget=budget).certificate
    assert found.bound <= least <= found.slowest <= 1.02 * least


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    num_ranks=st.integers(1, 4),
    spare=st.integers(0, 60),
    square=st.sampled_from([0.0, 0.05]),
)
@example(lengths=[1, 1, 0, 0], num_ranks=4, spare=1, square=0.0)
@example(lengths=[2, 1], num_ranks=1, spare=1, square=0.0)  # they fill the place
@example(lengths=[4] * 20, num_ranks=1, spare=6, square=0.0)  # the number that works was stepped over
def test_the_longest_goes_first_to_the_lightest_place_with_room(lengths, num_ranks, spare, square):
    """Against the rule in loops over all places, and as many micro-steps as the first number that works."""
    budget = max(lengths) + spare
    packed = pack_sequences(lengths, num_ranks, budget, square_cost=square)
    executed = [packed.sequences(m, g) for m in range(packed.num_micro_steps) for g in range(num_ranks)]
    assert sorted(np.concatenate(executed).tolist()) == list(range(len(lengths)))
    costs = np.array(lengths) + square * np.square(lengths, dtype=float)
    works = layout_oracle.dealt(lengths, costs, budget, packed.num_micro_steps * num_ranks)
    assert (packed.micro_step_S * num_ranks + packed.rank_S).tolist() == works
    fewer = (packed.num_micro_steps - 1) * num_ranks
    assert fewer == 0 or layout_oracle.dealt(lengths, costs, budget, fewer) is None


def test_padded_batches_equal_the_loop_and_ranks_can_agree_on_their_number():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(0, 20, int(rng.integers(1, 30))).tolist()
        budget = max(lengths) + int(rng.integers(0, 60))
        batches = padded_batches(lengths, budget)
        assert [batch.tolist() for batch in batches] == layout_oracle.greedy_padded_batches(lengths, budget), seed
    batches = padded_batches([4, 4, 4, 4, 1], 100, min_count=3)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2], [3, 4]]
    assert len(padded_batches([4] * 5, 100, min_count=5)) == 5
    assert padded_batches([], 10) == []
    assert [batch.tolist() for batch in padded_batches([0, 0], 0)] == [[0, 1]]


ROUTES = np.ones((3, 1, 4), int)
ASKED = {
    pack_sequences: {"lengths": [7, 9, 8], "num_ranks": 2, "token_budget": 20, "counts": ROUTES},
    exchange_sequences: {"packing": Packing(np.array([0, 0, 1]), np.zeros(3, int), 2, 2), "lengths": [7, 9, 8]}
    | {"counts": ROUTES},
    padded_batches: {"lengths": [7], "token_budget": 7},
}


@pytest.mark.parametrize(
    ("door", "change", "error", "message"),
    [
        (pack_sequences, {"counts": ROUTES[:2]}, LayoutError, "counts.*3 sequences"),
        (pack_sequences, {"counts": ROUTES * 1.0}, LayoutError, "float64.*expected integers"),
        (pack_sequences, {"counts": ROUTES[:, :0]}, LayoutError, r"0 layers.*at least"),
        (pack_sequences, {"counts": ROUTES * 8}, LayoutError, "sequence 0.*7 tokens"),
        (pack_sequences, {"counts": -ROUTES}, LayoutError, "sequence 0.*from -1"),
        (pack_sequences, {"counts": ROUTES[..., :3]}, LayoutError, "3 experts.*pass homes"),
        (pack_sequences, {"homes": [[0, 0, 1, 2]]}, LayoutError, "to 2.*0 to 1"),
        (pack_sequences, {"homes": [[0, 0, 1]]}, LayoutError, r"homes.*layers and.*experts"),
        (pack_sequences, {"groups": 3}, LayoutError, "2 ranks.*3 equal"),
        (pack_sequences, {"counts": None, "homes": [[0, 0, 1, 1]]}, ConfigError, "homes.*counts"),
        (
            pack_sequences,
            {"lengths": [2**29] * 3, "token_budget": 2**30, "counts": ROUTES * 2**29},
            LayoutError,
            "layer.*in parts",
        ),
        (pack_sequences, {"token_budget": 8}, LayoutError, "sequence 1 has 9 .* budget is 8; .* at least 9, or cut"),
        (pack_sequences, {"num_ranks": 0}, LayoutError, r"ranks is 0; .*whole number"),
        (pack_sequences, {"lengths": []}, LayoutError, r"no sequence.*pack"),
        (pack_sequences, {"lengths": [-1]}, LayoutError, "expected 0 or more"),
        (pack_sequences, {"token_budget": 20.5}, LayoutError, r"token budget.*20\.5"),
        (pack_sequences, {"square_cost": -1.0}, ConfigError, "square_cost is -1.0"),
        (exchange_sequences, {"lengths": [7, 9]}, LayoutError, "2 lengths.*3 sequences"),
        (
            exchange_sequences,
            {"packing": Packing(np.array([0, 2, 1]), np.zeros(3, int), 2, 2)},
            LayoutError,
            "sequence 1.*micro-step 2.*0 to 1",
        ),
        (exchange_sequences, {"token_budget": 15}, LayoutError, "micro-step 0 of rank 0.*16 tokens.*budget is 15"),
        (padded_batches, {"lengths": [3, 9]}, LayoutError, r"sequence 1 .*9 .*budget is 7; raise"),
        (padded_batches, {"min_count": 2}, LayoutError, r"1 sequences.*make 2"),
        (padded_batches, {"lengths": [-1]}, LayoutError, "expected 0 or more"),
    ],
)
def test_what_cannot_be_packed_is_refused(door, change, error, message):
    with pytest.raises(error, match=message):
        door(**ASKED[door] | change)

"""The mismatch measures, by hand and by loops over plain lists."""

import math

import numpy as np
import pytest

import foreroute as fr
from foreroute.errors import InputError, SpecMismatchError
from foreroute.mismatch import (
    LiveAgreement,
    RoutingMismatch,
    TokenMismatch,
    margin_histogram,
    routing_mismatch,
    token_mismatch,
)
from foreroute.mismatch.measures import LOG10_EDGES
from tests.traces import random_trace, spec_of


def test_k3_and_f_by_hand():
    train = np.log([0.5, 0.9, 0.1, 0.2])
    infer = np.log([0.5, 0.3, 0.25, 0.25])
    result = token_mismatch(train, infer)
    ratios = [1.0, 3.0, 0.4, 0.8]
    assert result.k3 == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4, rel=1e-12)
    assert result.f(2.0) == 2 / 4  # 3.0 and 1 / 0.4
    assert result.f(1.5) == 2 / 4
    assert result.max_abs_log == pytest.approx(math.log(3))


def test_f_is_kept_for_its_thresholds_alone():
    with pytest.raises(InputError, match=r"F\(3.0\) was not counted; expected tau to be one of 1.5, 2.0"):
        token_mismatch(np.zeros(1), np.zeros(1)).f(3.0)


def test_the_threshold_itself_does_not_count():
    assert token_mismatch(np.zeros(1), -np.array([math.log(2.0)])).f(2.0) == 0


def test_k3_keeps_its_precision_for_tiny_differences():
    delta = 1e-6
    assert token_mismatch(np.zeros(10), np.full(10, -delta)).k3 == pytest.approx(delta**2 / 2, rel=1e-4)


def test_parts_add_to_the_whole_however_they_are_cut():
    rng = np.random.default_rng(0)
    train, infer = -rng.exponential(1, 100), -rng.exponential(1, 100)
    whole = token_mismatch(train, infer)
    uneven = token_mismatch(train[:7], infer[:7]) + token_mismatch(train[7:], infer[7:])
    assert uneven.k3 == pytest.approx(whole.k3, rel=1e-12)
    assert (uneven.count, uneven.above, uneven.max_abs_log) == (whole.count, whole.above, whole.max_abs_log)


def test_a_probability_of_one_may_be_rounded_up():
    assert token_mismatch(np.array([5e-4]), np.array([-5e-4])).count == 1


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_ratio_that_no_float_holds_leaves_a_number():
    """One token of a broken engine ends no run; added up over ranks it does not either."""
    found = token_mismatch(np.array([-1.0, -2.0]), np.array([-800.0, -2.0]))
    assert math.isfinite(found.k3)
    assert math.isfinite((found + found).k3)
    assert (found.max_abs_log, found.f(2.0)) == (799.0, 0.5)
    assert token_mismatch(np.array([-1.0]), np.array([-700.0])).k3 == np.expm1(699.0) - 699.0


def test_no_token_is_no_number():
    assert math.isnan(token_mismatch(np.zeros(0), np.zeros(0)).k3)


@pytest.mark.parametrize(
    ("train", "infer", "message"),
    [
        (np.zeros(3), np.zeros(2), "shape"),
        (np.array([np.nan]), np.zeros(1), "the trainer hold nan; expected finite numbers up to 0"),
        (np.zeros(1), np.array([-np.inf]), "the engine hold -inf"),
        (np.zeros(2), np.array([0.0, 2e-3]), "the engine hold 0.002"),
        (np.array([7.0]), np.zeros(1), "the trainer hold 7.0"),
    ],
)
def test_impossible_log_probs_are_refused(train, infer, message):
    with pytest.raises(InputError, match=message):
        token_mismatch(train, infer)


def test_the_first_impossible_log_prob_is_told_by_its_place_among_those_that_count():
    given = np.array([[np.nan, -1.0, -2.0], [-1.0, np.nan, np.inf]])
    with pytest.raises(InputError, match="2 of 4 have none, the first at 2 of those that count; leave"):
        token_mismatch(np.full((2, 3), -1.0), given, mask=[[0, 1, 1], [0, 1, 1]])


@pytest.mark.parametrize("seed", range(8))
def test_routing_mismatch_matches_a_loop(seed):
    a = random_trace(seed, num_experts=4, num_layers=3)
    b = random_trace(seed, num_experts=4, num_layers=3, route_seed=seed + 100)
    result = routing_mismatch(a, b)
    per_row = [
        [set(a.expert_ids_NLK[n, j]) != set(b.expert_ids_NLK[n, j]) for j in range(3)]
        for n in range(a.num_rows)
        if a.valid_N[n] and b.valid_N[n]
    ]
    assert result.rows == len(per_row)
    assert result.differing_L.tolist() == [sum(row[j] for row in per_row) for j in range(3)]
    assert result.by_differing_layers.tolist() == [sum(sum(row) == d for row in per_row) for d in range(4)]
    firsts = [row.index(True) for row in per_row if any(row)]
    assert result.first_differing_L.tolist() == [firsts.count(j) for j in range(3)]
    if per_row:
        assert result.differing_share == pytest.approx(np.mean(per_row))
        assert result.differing_tokens_share == pytest.approx(np.mean([any(row) for row in per_row]))
    both = result + result
    assert both.rows == 2 * result.rows
    assert both.differing_share == pytest.approx(result.differing_share)


def test_of_no_rows_no_share_is_said():
    """0 would say that nothing differs."""
    nothing = random_trace(0).select([])
    result = routing_mismatch(nothing, nothing)
    assert (result.rows, math.isnan(result.differing_share), math.isnan(result.differing_tokens_share)) == (
        0,
        True,
        True,
    )
    assert np.isnan(result.differing_share_L).all()
    assert np.isnan(result.overlap_L).all()


def test_pick_order_is_no_difference():
    spec = spec_of(num_experts=4, top_k=2, num_layers=1)
    a = fr.RoutingTrace.from_sequences(spec, [[1, 2]], [[[[0, 1]], [[2, 3]]]])
    b = fr.RoutingTrace.from_sequences(spec, [[1, 2]], [[[[1, 0]], [[2, 1]]]])
    result = routing_mismatch(a, b)
    assert result.differing_share == 0.5
    assert result.overlap_L.tolist() == [0.75]


@pytest.mark.parametrize(
    ("layers", "picks"), [(3, [2, 2, 2]), (1, [2]), (2, [3, 3]), (2, [2, 3]), (2, [2, 1])], ids=str
)
def test_mismatches_of_other_models_do_not_add_up(layers, picks):
    """As of ranks that were started with other models: one layer would have been added to each of two."""
    one = RoutingMismatch(4, np.array([2, 2]), *(np.zeros(n, np.int64) for n in (2, 2, 3, 2)))
    other = RoutingMismatch(4, np.array(picks), *(np.zeros(n, np.int64) for n in (layers, layers, layers + 1, layers)))
    live = [LiveAgreement(each, np.zeros((2, 36), np.int64), np.zeros(2)) for each in (one, other)]
    for pair in ((one, other), (other, one), live):
        with pytest.raises(SpecMismatchError, match=r"2 layers with picks \[2, 2\].*; add those of one model"):
            pair[0] + pair[1]
    assert (one + one).rows == 8


def test_shares_of_other_thresholds_do_not_add_up():
    one, other = TokenMismatch(3, 0.1, (1, 0), 0.4), TokenMismatch(3, 0.1, (1,), 0.4)
    for pair in ((one, other), (other, one)):
        with pytest.raises(InputError, match=r"one mismatch counts \d thresholds.*foreroute, 1\.5, 2\.0"):
            pair[0] + pair[1]
    assert (one + one).above == (2, 0)


def test_a_margin_that_is_no_number_is_refused_where_its_token_counts():
    margins = np.array([[0.1, np.nan], [np.inf, -0.5], [np.nan, np.nan]])
    with pytest.raises(InputError, match="3 of 6 margins are NaN, which no bin counts"):
        margin_histogram(margins)
    counts = margin_histogram(margins, mask=[0, 1, 0])
    assert (counts[0, -1], counts[1, 0], counts.sum()) == (1, 1, 2), "the largest, and below 0 the smallest"


def test_margins_fall_into_their_bins():
    margins = np.array([[0.0, 1e-3], [1e-20, 0.05], [100.0, 0.05]])
    counts = margin_histogram(margins)
    assert counts.sum(axis=1).tolist() == [3, 3]
    assert counts[0, 0] == 2
    assert counts[0, -1] == 1
    low = np.searchsorted(LOG10_EDGES, math.log10(0.05), side="right") - 1
    assert counts[1, low] == 2

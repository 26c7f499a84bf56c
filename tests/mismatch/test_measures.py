"""The mismatch measures, by hand and by loops over plain lists."""

import math

import numpy as np
import pytest

from foreroute.errors import InputError, SpecMismatchError
from foreroute.mismatch import (
    LiveAgreement,
    RoutingMismatch,
    TokenMismatch,
    margin_histogram,
    routing_mismatch,
    token_mismatch,
)
from tests.traces import random_trace


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

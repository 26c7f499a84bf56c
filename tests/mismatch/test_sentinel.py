"""The sentinel over rows that are drawn: what is planted is found and named, and a healthy run stays below its rate."""

import copy
import math
from functools import cache

import numpy as np
import pytest

from foreroute.errors import InputError
from foreroute.mismatch import LooksLike, RootCounts, Sentinel
from foreroute.mismatch.sentinel import WARM_UP
from foreroute.trace import RoutedLayer, RoutingSpec
from tests.tiers import grid

LAYERS, SEQUENCES, ROWS = 12, 16, 128
SPEC = RoutingSpec(64, 4, tuple(map(RoutedLayer, range(LAYERS))))


def draw(rng, share=0.03, *, alike=1, spread=0.0, sequences=SEQUENCES, rows=ROWS):
    """Bool [S, T, L], roots; runs of `alike` rows have one share, and sequences differ in it by a factor."""
    share_S = share * np.exp(spread * rng.standard_normal((sequences, 1, 1)))
    share_ST = share_S * np.repeat(rng.exponential(1.0, (sequences, -(-rows // alike), 1)), alike, axis=1)[:, :rows]
    return rng.random((sequences, rows, LAYERS)) < share_ST.clip(0, 0.9)


def counts(roots_STL, **beside):
    rows_N = roots_STL.sum(2).reshape(-1)
    others = {name: beside.get(name, np.zeros_like(rows_N)) for name in ("before_N", "after_N", "repeats_N")}
    return RootCounts(rows_N, **others, roots_L=roots_STL.sum((0, 1)), lengths_S=[roots_STL.shape[1]] * len(roots_STL))


@cache
def warm(share=0.03, batches=WARM_UP):
    """A sentinel with a past."""
    rng, sentinel = np.random.default_rng(1), Sentinel(SPEC)
    for number in range(batches):
        assert sentinel.until_judged == max(WARM_UP - number, 0)
        assert not sentinel.judge(counts(draw(rng, share)))
    return sentinel


def judged(roots_STL, *past, **beside):
    return copy.deepcopy(warm(*past)).judge(counts(roots_STL, **beside))


def test_a_block_of_rows_is_found_where_it_begins_and_no_other_sequence_is():
    roots = draw(np.random.default_rng(2))
    roots[5, 40:104] = True
    [found] = judged(roots)
    assert (found.looks_like, found.sequence, found.layer) == (LooksLike.STALE_ROWS, 5, None)
    assert abs(found.since - 40) <= 2
    assert abs(found.num_rows - 64) <= 4
    assert f"sequence 5, from position {found.since} on: in {found.num_rows} of " in found.sentence
    assert found.chance < 1e-6


def test_the_rows_say_what_they_look_like():
    rng = np.random.default_rng(3)
    roots = draw(rng)
    roots[2], roots[7, 30:] = True, True
    beside = np.zeros((SEQUENCES, ROWS), np.int64)
    beside[2], beside[7, 30:] = LAYERS // 2, LAYERS
    beside = beside.reshape(-1)
    plain, shifted = judged(roots), judged(roots, after_N=beside)
    assert [each.looks_like for each in plain] == [LooksLike.OTHER_SEQUENCE, LooksLike.STALE_ROWS]
    assert [each.looks_like for each in shifted] == [LooksLike.SHIFT, LooksLike.SHIFT]
    assert "token before" in shifted[0].sentence
    assert "next token" in judged(roots, before_N=beside)[0].sentence
    # natives that are alike on both sides are no shift
    assert judged(roots, before_N=beside, after_N=beside)[0].looks_like == LooksLike.OTHER_SEQUENCE
    assert judged(roots, repeats_N=beside)[1].looks_like == LooksLike.FROZEN


@pytest.mark.parametrize(("above", "layer"), [(0.9, 1), (0.4, 3)])
def test_one_layer_is_named_though_layers_above_it_follow(above, layer):
    roots = draw(np.random.default_rng(4))
    roots[:, :, layer] = True
    roots[:, :, layer + 1 :] |= np.random.default_rng(5).random(roots[:, :, layer + 1 :].shape) < above
    [found] = judged(roots)
    assert (found.looks_like, found.layer, found.sequence) == (LooksLike.STALE_LAYER, layer, None)
    # of two that rise alike, both are
    two = draw(np.random.default_rng(4))
    two[:, :, [layer, layer + 4]] |= np.random.default_rng(5).random((SEQUENCES, ROWS, 2)) < 0.4
    assert {each.layer for each in judged(two)} == {layer, layer + 4}
    # a block of rows beside it is found too
    roots[5, 40:104] = True
    assert [each.sequence for each in judged(roots)] == [None, 5]


def test_all_rows_a_little_are_other_weights_and_all_rows_much_are_other_tokens():
    rng = np.random.default_rng(6)
    assert not judged(draw(rng, 0.032), 0.03, 24)
    assert [each.looks_like for each in judged(draw(rng, 0.05), 0.03, 24)] == [LooksLike.OLDER_WEIGHTS]
    sentinel = Sentinel(SPEC)
    for _ in range(WARM_UP + 1):  # from the first batch on, and never learnt
        [found] = sentinel.judge(counts(draw(rng, 3.0)))
        assert (found.looks_like, found.sequence) == (LooksLike.UNRELATED, None)
    assert sentinel.until_judged == WARM_UP


def test_the_chance_of_a_batch_is_that_of_loops_and_of_an_integral():
    """Of Student's t of its distance from the mean of eight batches before it, beside those of earlier ones."""
    rng, sentinel, angles = np.random.default_rng(17), Sentinel(SPEC), []
    for share in (*[0.03] * (WARM_UP + 4), 0.05):
        roots = draw(rng, share)
        found = sentinel.judge(counts(roots))
        angles.append(math.asin(math.sqrt(roots.mean())))
    befores = [angles[max(n - 8, 0) : n] for n in range(1, len(angles))]
    *errors, last = (
        (angle - np.mean(before)) / math.sqrt(1 + 1 / len(before))
        for angle, before in zip(angles[1:], befores, strict=True)
    )
    t = (last - np.mean(errors)) / np.std(errors, ddof=1) / math.sqrt(1 + 1 / len(errors))
    freedom, steps = len(errors) - 1, np.geomspace(t, 1e4 * t, 100_000)
    tail = 0.4 * (1 + steps**2 / freedom) ** (-(freedom + 1) / 2) * steps / t
    assert [each.chance for each in found] == pytest.approx([np.trapezoid(tail, steps)], rel=1e-4)


def test_what_is_suspected_is_not_learnt():
    rng, sentinel = np.random.default_rng(7), copy.deepcopy(warm())
    for _ in range(3 * WARM_UP):
        roots = draw(rng)
        roots[1, 96:] = True
        assert [each.sequence for each in sentinel.judge(counts(roots))] == [1]
    assert not sentinel.judge(counts(draw(rng)))


@grid(("share", "alike", "spread"), [(0.03, 4, 0.3), (0.2, 8, 0.2)], quick=1)
def test_healthy_rows_alarm_no_more_often_than_the_rate(share, alike, spread):
    """At a rate that shows: independent rows, rows that come in runs, sequences that differ."""
    rng, rate = np.random.default_rng(9), 0.01
    sentinel, sequences, batches, num_batches = Sentinel(SPEC, rate), 0, 0, 150
    for _ in range(num_batches):
        is_judged = not sentinel.until_judged
        found = sentinel.judge(counts(draw(rng, share, alike=alike, spread=spread, rows=64)))
        sequences += is_judged * sum(each.sequence is not None for each in found)
        batches += is_judged * sum(each.sequence is None for each in found)
    assert sequences <= rate * SEQUENCES * num_batches
    assert batches <= 3 * 2 * rate * num_batches  # of layers, and of the batch


def test_a_past_that_is_taken_up_judges_as_the_one_that_gave_it():
    rng, sentinel, resumed = np.random.default_rng(15), Sentinel(SPEC), Sentinel(SPEC)
    for number in range(WARM_UP + 3):
        resumed.restore(sentinel.state())
        assert resumed.until_judged == sentinel.until_judged
        healthy, planted = draw(rng, 0.05), draw(rng, 0.05)
        planted[5, 40:] = True
        planted[:, :, 2] |= number == WARM_UP + 1
        repeats = np.full(SEQUENCES * ROWS, number)
        for roots in (planted, healthy):
            assert sentinel.judge(counts(roots, repeats_N=repeats)) == resumed.judge(counts(roots, repeats_N=repeats))
        assert np.array_equal(sentinel.state(), resumed.state())
    state = sentinel.state()
    for wrong in (state[1:], state.astype(np.float32), -2 - state, state * np.nan):
        with pytest.raises(InputError, match="past"):
            sentinel.restore(wrong)
    assert np.array_equal(sentinel.state(), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"roots_N": [0, 3]}, "up to 3 layers"),
        ({"roots_N": [0]}, "roots_N has 1 rows"),
        ({"after_N": [[0, 1]]}, r"after_N.*list"),
        ({"roots_L": [3, 0]}, "counts 3 rows of a layer"),
    ],
)
def test_counts_that_cannot_be_are_refused(change, message):
    zeros = {name: [0, 0] for name in ("roots_N", "before_N", "after_N", "repeats_N", "roots_L")} | {"lengths_S": [2]}
    with pytest.raises(InputError, match=message):
        RootCounts(**zeros | change)
    with pytest.raises(InputError, match="of 2 layers"):
        Sentinel(SPEC).judge(RootCounts(**zeros))

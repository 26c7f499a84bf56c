"""The mismatch measures: on padded batches of any library and type beside loops over plain lists, and refused."""

import math

import numpy as np
import pytest

import foreroute as fr
from foreroute.errors import InputError, SpecMismatchError, TraceContentError
from foreroute.mismatch import RoutingMismatch, TokenMismatch, margin_histogram, routing_mismatch, token_mismatch
from foreroute.mismatch.measures import LOG10_EDGES, as_traces
from tests.traces import random_trace

torch = pytest.importorskip("torch")

FLOATS = [np.float16, np.float32, np.float64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int64, np.uint64, torch.uint8, torch.int16, torch.int64]
MASKS = [np.bool_, np.int64, np.float32, torch.bool, torch.int64, torch.bfloat16]


def given_as(array, dtype):
    """The same numbers in a type of numpy, or as a tensor with a gradient where it may have one."""
    if not isinstance(dtype, torch.dtype):
        return array.astype(dtype)
    tensor = torch.from_numpy(array).to(dtype)
    return tensor.requires_grad_() if dtype.is_floating_point else tensor


def as_floats(array):
    """What a loop sees of them."""
    return array.detach().double().tolist() if isinstance(array, torch.Tensor) else array.astype(np.float64).tolist()


def batch(seed, shape=(5, 9)):
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.6
    values = [np.where(mask, -rng.exponential(1, shape), rng.choice([np.nan, 7.0, -np.inf])) for _ in range(2)]
    return values, mask


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("of_mask", MASKS, ids=str)
def test_token_mismatch_of_a_padded_batch_is_that_of_a_loop(dtype, of_mask):
    (train, infer), mask = batch(0)
    train, infer = given_as(train, dtype), given_as(infer, dtype)
    found = token_mismatch(train, infer, mask=given_as(mask, of_mask))
    pairs = [
        (t, i)
        for ts, ins, ms in zip(as_floats(train), as_floats(infer), mask.tolist(), strict=True)
        for t, i, m in zip(ts, ins, ms, strict=True)
        if m
    ]
    ratios = [math.exp(t - i) for t, i in pairs]
    assert found.count == len(pairs) > 20
    assert found.k3 == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / len(pairs), rel=1e-9)
    for tau in (1.5, 2.0):
        assert found.f(tau) == sum(max(r, 1 / r) > tau for r in ratios) / len(pairs)
    assert found.max_abs_log == pytest.approx(max(abs(t - i) for t, i in pairs))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("masked", [True, False])
def test_routing_mismatch_of_a_padded_batch_is_that_of_a_loop(dtype, masked):
    rng = np.random.default_rng(2)
    a = np.argsort(rng.random((4, 7, 3, 6)), axis=-1)[..., :2]
    b = np.where(rng.random((4, 7, 3, 1)) < 0.6, a[..., ::-1], np.argsort(rng.random((4, 7, 3, 6)), axis=-1)[..., :2])
    signed = np.dtype(dtype).kind == "i" if not isinstance(dtype, torch.dtype) else dtype.is_signed
    gaps = rng.random((2, 4, 7)) < (0.2 if signed else 0)
    a[gaps[0]], b[gaps[1]] = -1, -1
    mask = rng.random((4, 7)) < 0.7 if masked else np.ones((4, 7), bool)
    found = routing_mismatch(given_as(a, dtype), b, mask=mask if masked else None)  # types of sides may differ
    counted = [place for place in np.ndindex(4, 7) if mask[place] and not gaps[:, *place].any()]
    shared = np.array(
        [[len({*x} & {*y}) / 2 for x, y in zip(a[p].tolist(), b[p].tolist(), strict=True)] for p in counted]
    )
    rows = (shared < 1).tolist()
    assert found.rows == len(rows) > 8
    assert found.differing_L.tolist() == [sum(row[j] for row in rows) for j in range(3)]
    assert found.by_differing_layers.tolist() == [sum(sum(row) == d for row in rows) for d in range(4)]
    firsts = [row.index(True) for row in rows if any(row)]
    assert found.first_differing_L.tolist() == [firsts.count(j) for j in range(3)]
    assert 0 < found.differing_share < 1
    assert found.differing_share == pytest.approx(np.mean(rows))
    assert found.differing_tokens_share == pytest.approx(np.mean([any(row) for row in rows]))
    assert found.overlap_L == pytest.approx(np.mean(shared, axis=0))
    both = found + found
    assert (both.rows, both.differing_share) == (2 * found.rows, pytest.approx(found.differing_share))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_margins_of_a_padded_batch_are_those_of_a_loop(dtype):
    rng = np.random.default_rng(3)
    margins = 10 ** rng.uniform(-10, 3, (3, 8, 2))
    margins[0, :3] = 0
    margins = given_as(margins, dtype)
    mask = rng.random((3, 8)) < 0.5
    found = margin_histogram(margins, mask=mask)
    expected = np.zeros_like(found)
    for row, own in zip(as_floats(margins), mask.tolist(), strict=True):
        for layers, counts in zip(row, own, strict=True):
            for layer, margin in enumerate(layers):
                log = math.log10(min(max(margin, 1e-8), 9.99))
                expected[layer, sum(log >= edge for edge in LOG10_EDGES) - 1] += counts
    assert found.tolist() == expected.tolist()
    assert found.sum() == 2 * mask.sum()


def test_a_margin_that_is_no_number_is_refused_where_its_token_counts():
    margins = np.array([[0.1, np.nan], [np.inf, -0.5], [np.nan, np.nan]])
    with pytest.raises(InputError, match=r"3.*6 margins.*NaN"):
        margin_histogram(margins)
    counts = margin_histogram(margins, mask=[0, 1, 0])
    assert (counts[0, -1], counts[1, 0], counts.sum()) == (1, 1, 2), "the largest, and below 0 the smallest"


def test_routes_that_cannot_be_compared_are_refused():
    ids = np.tile([[0, 1]], (1, 4, 3, 1))
    trace = fr.RoutingTrace.from_padded(fr.RoutingSpec(4, 2, tuple(map(fr.RoutedLayer, range(3)))), [[1] * 4], ids)
    assert routing_mismatch(ids, ids).rows == routing_mismatch(trace, trace).rows == 4
    assert routing_mismatch(ids[:, :, :1], ids[:, :, 1:2]).rows == 4, "one layer will do"
    for pair, mask in (((trace, ids), None), ((trace, trace), np.ones((1, 4)))):
        with pytest.raises(InputError, match=r"trace.*beside"):
            routing_mismatch(*pair, mask=mask)
    for other, mask in ((ids[:, :3], None), (ids, [[1] * 3])):
        with pytest.raises(InputError, match=r"\[B, T, layers, picks\].*\[B, T\]"):
            routing_mismatch(ids, other, mask=mask)
    with pytest.raises(TraceContentError, match="expected integers"):
        routing_mismatch(ids, ids * 1.0)
    beyond = ids.copy()
    beyond[0, 3] = 2**40
    assert as_traces(ids, beyond, [[1, 1, 1, 0]])[0].spec.num_experts == 2, "padding is not looked at"
    padded = ids.copy()
    padded[0, 3] = 0
    with pytest.raises(TraceContentError, match=r"position 3.*zeros"):
        routing_mismatch(padded, padded)


def test_parts_add_to_the_whole_and_edges_count_as_they_should():
    rng = np.random.default_rng(0)
    train, infer = -rng.exponential(1, 100), -rng.exponential(1, 100)
    whole = token_mismatch(train, infer)
    uneven = token_mismatch(train[:7], infer[:7]) + token_mismatch(train[7:], infer[7:])
    assert uneven.k3 == pytest.approx(whole.k3, rel=1e-12)
    assert (uneven.count, uneven.above, uneven.max_abs_log) == (whole.count, whole.above, whole.max_abs_log)
    assert token_mismatch([0.0], [-math.log(2.0)]).f(2.0) == 0, "the threshold itself does not count"
    assert token_mismatch([0.0], [-1e-7]).k3 == pytest.approx(1e-14 / 2, rel=1e-4, abs=0), (
        "tiny differences keep precision"
    )
    assert token_mismatch([5e-4], [-5e-4]).count == 1, "a probability of 1 may be rounded up"
    nothing = random_trace(0).select([])
    routes = routing_mismatch(nothing, nothing)
    shares = [routes.differing_share, routes.differing_tokens_share, *routes.differing_share_L, *routes.overlap_L]
    assert np.isnan([token_mismatch(np.zeros(0), np.zeros(0)).k3, *shares]).all(), "0 would say that nothing differs"
    with pytest.raises(InputError, match=r"F.*3.0.*1.5, 2.0"):
        whole.f(3.0)


WIDE = np.zeros((4, 17))
HOLES = np.array([[np.nan, -1.0, -2.0], [-1.0, np.nan, np.inf]])


@pytest.mark.parametrize(
    ("train", "infer", "mask", "message"),
    [
        (WIDE, WIDE, None, r"float64 of shape \(4, 17\), without.*mask; .*padded.*mask="),
        (WIDE, WIDE, np.ones(4), r"with a mask of \(4,\)"),
        (["-1.0"], ["-1.0"], None, "are <U4"),
        (WIDE, WIDE, np.full((4, 17), 0.5), r"mask.*float64.*bools.*0 and 1"),
        (np.zeros(3), np.zeros(2), None, "shape"),
        ([np.nan], [0.0], None, r"trainer.*nan; .*finite"),
        ([0.0, 0.0], [0.0, 2e-3], None, r"engine.*0\.002"),
        (np.full((2, 3), -1.0), HOLES, [[0, 1, 1], [0, 1, 1]], r"2 of 4 .*first at 2 of"),
    ],
)
def test_numbers_that_are_no_log_probs_of_the_same_tokens_are_refused(train, infer, mask, message):
    with pytest.raises(InputError, match=message):
        token_mismatch(train, infer, mask=mask)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_ratio_that_no_float_holds_leaves_a_number():
    """One token of a broken engine ends no run; added up over ranks it does not either."""
    found = token_mismatch(np.array([-1.0, -2.0]), np.array([-800.0, -2.0]))
    assert math.isfinite(found.k3)
    assert math.isfinite((found + found).k3)
    assert (found.max_abs_log, found.f(2.0)) == (799.0, 0.5)
    assert token_mismatch(np.array([-1.0]), np.array([-700.0])).k3 == np.expm1(699.0) - 699.0


def test_mismatches_of_other_models_or_thresholds_do_not_add_up():
    """As of ranks that were started with other models: one layer would have been added to each of two."""
    one, *others = (
        RoutingMismatch(4, np.array(picks), *(np.zeros(n, np.int64) for n in (len(picks),) * 2 + (len(picks) + 1,) * 2))
        for picks in ([2, 2], [2, 2, 2], [2], [2, 3])
    )
    for other in others:
        with pytest.raises(SpecMismatchError, match=r"2 layers.*picks \[2, 2\]"):
            one + other
    with pytest.raises(InputError, match=r"\d thresholds.*foreroute, 1\.5, 2\.0"):
        TokenMismatch(3, 0.1, (1, 0), 0.4) + TokenMismatch(3, 0.1, (1,), 0.4)

"""Arrays with masked entries: numpy drops the mask, and what it hides would be taken for values."""

import numpy as np
import pytest

import foreroute as fr
from foreroute import layout, mismatch
from foreroute.capture import Generation
from foreroute.errors import InputError
from foreroute.plan.counts import check_counts
from tests.traces import random_trace

SPEC = fr.RoutingSpec(8, 2, (fr.RoutedLayer(0),))
HIDDEN = np.ma.array([1, 2], mask=[False, True])
ROUTES = np.ma.array([[[0, 1]], [[2, 3]]], mask=[[[False, False]], [[True, True]]])
TRACE = fr.RoutingTrace.from_sequences(SPEC, [[1, 2]], [[[[0, 1]]]])
COUNTS = np.ma.masked_equal(np.arange(4).reshape(1, 1, 2, 2), 3)
LOGPROBS = np.ma.array([-0.5, -700.0], mask=[False, True])
MASK = np.ma.array([[True, True]], mask=[[False, True]])
DOORS = {
    "tokens": lambda: fr.RoutingTrace.from_sequences(SPEC, [HIDDEN], [[[[0, 1]], [[2, 3]]]]),
    "routes": lambda: fr.RoutingTrace.from_sequences(SPEC, [[1, 2]], [ROUTES]),
    "padded routes": lambda: fr.RoutingTrace.from_padded(SPEC, [[1, 2]], ROUTES[None]),
    "an attention mask": lambda: fr.RoutingTrace.from_padded(SPEC, [[1, 2]], [[[[0, 1]], [[2, 3]]]], MASK),
    "sequences": lambda: random_trace(0).select(HIDDEN - 1),
    "lengths": lambda: layout.pack(HIDDEN),
    "a batch": lambda: layout.locate_rows(random_trace(0), HIDDEN[None]),
    "a batch's mask": lambda: layout.locate_rows(random_trace(0), [[1, 2]], MASK),
    "starts": lambda: layout.locate_rows(random_trace(0), [[1, 2]], None, MASK),
    "positions": lambda: layout.starts_from_positions(HIDDEN[None] - 1, np.ones((1, 2), bool)),
    "cumulative lengths": lambda: layout.starts_from_cumulative_lengths(HIDDEN - 1, np.ones((1, 1), bool)),
    "values of ranks": lambda: layout.collect([(layout.pack([2]).rows(), LOGPROBS)]),
    "counts": lambda: check_counts(COUNTS),
    "log-probs": lambda: mismatch.token_mismatch(LOGPROBS, [-0.5, -0.5]),
    "compared log-probs": lambda: fr.compare(LOGPROBS, [-0.5, -0.5]),
    "log-probs of a generation": lambda: Generation(
        TRACE, np.array([1]), LOGPROBS[1:].astype(np.float32), np.array([False, True])
    ),
    "sampled tokens": lambda: Generation(TRACE, np.array([1]), np.zeros(1, np.float32), HIDDEN - 1 == 0),
    "margins": lambda: mismatch.margin_histogram(np.ma.array([[0.1], [0.2]], mask=[[True], [False]])),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_array_with_masked_entries_is_refused(door):
    with pytest.raises(InputError, match=r"masked.(entries|array)"):
        DOORS[door]()

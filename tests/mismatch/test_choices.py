"""Choices of indexers that stand at other rows or layers are found there; noise is not blamed on that."""

import numpy as np
import pytest

from foreroute.mismatch import misplaced_choices
from foreroute.trace import INDEXER
from tests.traces import choices_of


def moved(trace, rows):
    return trace.with_stream(INDEXER, trace.streams[INDEXER].take(rows))


def rows_at(trace, shift):
    parts = [np.arange(a, b) for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)]
    return np.concatenate([np.roll(part, shift) for part in parts])


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("shift", "words"), [(1, "the token 1 earlier"), (-2, "the token 2 later"), (4, "4 earlier")])
def test_a_shift_is_named(shift, words, noise):
    """Row p has the choice of the query `shift` tokens before it."""
    other = choices_of(noise)
    assert words in misplaced_choices(choices_of(), moved(other, rows_at(other, shift)))


@pytest.mark.parametrize(("by", "words"), [(1, "the layer 1 before"), (-1, "the layer 1 after")])
def test_choices_of_another_layer_are_named(by, words):
    """In the place of layer l are the choices of layer l - by."""
    other = choices_of(0.05)
    stream = other.streams[INDEXER]
    per_layer = []
    for layer in np.roll(np.arange(4), by):
        sets = [
            stream.ids[a:b] for a, b in zip(stream.offsets[layer:-1:4], stream.offsets[layer + 1 :: 4], strict=True)
        ]
        per_layer.append(([len(each) for each in sets], sets))
    counts = np.array([counts for counts, _ in per_layer]).T
    ids = np.concatenate([sets[n] for n in range(stream.num_rows) for _, sets in per_layer])
    rolled = type(stream).from_sets(stream.num_choices, stream.valid_N, counts, ids, layers=stream.layers)
    assert words in misplaced_choices(choices_of(), other.with_stream(INDEXER, rolled))


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5, 3.0])
def test_noise_is_not_called_misplaced(noise):
    assert misplaced_choices(choices_of(), choices_of(noise, seed=1)) == ""


def test_traces_that_cannot_be_compared_say_nothing():
    trace = choices_of()
    assert misplaced_choices(trace, trace.without_streams()) == ""
    assert misplaced_choices(trace, trace.truncated([50, 48, 60])) == ""

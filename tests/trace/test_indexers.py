"""Choices of indexers: which sizes and units a row may have, against a count by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from foreroute.errors import TraceContentError
from foreroute.trace import IndexerSpec
from foreroute.trace.checks import as_offsets

LAYERS = (fr.RoutedLayer(1), fr.RoutedLayer(4))
SPECS = {
    "tokens": IndexerSpec(3, LAYERS),
    "compressed entries": IndexerSpec(2, LAYERS, unit=4),
    "blocks of two heads": IndexerSpec(2, LAYERS, unit=3, heads=2, sees_begun=True),
}


def visible(spec, position):
    """The oracle: units with a token, or with their last token, at or before a position."""
    first_or_last = 0 if spec.sees_begun else spec.unit - 1
    return [u for u in range(position + 1) if u * spec.unit + first_or_last <= position]


def choices_of(spec, lengths, rng):
    """A stream by `IndexerSpec.stream`, and each set, where not all is seen, as a list of (head, unit)."""
    position_N = np.concatenate([np.arange(n) for n in lengths])
    layers, expected = [], []
    for _ in spec.layers:
        sets = [
            sorted(
                (int(u), head) for head in range(spec.heads) for u in rng.permutation(visible(spec, p))[: spec.top_k]
            )
            for p in position_N
        ]
        ids = [[u * spec.heads + head for u, head in each] for each in sets]
        layers.append(
            (np.array([len(i) for i in ids], np.int64), np.array([i for each in ids for i in each], np.int32))
        )
        expected.append(
            [each if len(visible(spec, p)) > spec.top_k else [] for each, p in zip(sets, position_N, strict=True)]
        )
    return spec.stream(position_N, layers), expected


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(SPECS)))
def test_a_stream_holds_what_was_chosen_and_nothing_where_all_was(seed, name):
    spec, rng = SPECS[name], np.random.default_rng(seed)
    lengths = rng.integers(0, 15, 3)
    stream, expected = choices_of(spec, lengths, rng)
    for layer, sets in enumerate(expected):
        for row, chosen in enumerate(sets):
            start, stop = stream.offsets[row * 2 + layer : row * 2 + layer + 2]
            assert [divmod(int(i), spec.heads) for i in stream.ids[start:stop]] == chosen
    spec.check(stream, as_offsets(lengths))


@pytest.mark.parametrize("name", SPECS)
def test_a_row_says_by_its_sets_where_it_may_stand(name):
    spec = SPECS[name]
    stream, _ = choices_of(spec, [14], np.random.default_rng(0))
    offsets = np.array([0, 14])
    spec.check(stream, offsets)
    for rows in (np.roll(np.arange(14), 1), np.roll(np.arange(14), -1)):
        with pytest.raises(TraceContentError, match=r"sequence 0, position \d+.*decoder.*\d+"):
            spec.check(stream.take(rows), offsets)
    with pytest.raises(TraceContentError, match=r"belong.*another"):
        spec.check(stream, np.array([0, 7, 14]))  # of one sequence, and not of two
    spec.check(stream.without(np.arange(5, 9)), offsets)  # no choice is no wrong choice

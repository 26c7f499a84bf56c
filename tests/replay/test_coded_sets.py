"""Choices as they travel: against the plain sets of a stream and the entropy bound; ids of 16 bits."""

from math import comb, log2

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from foreroute.errors import TraceContentError
from foreroute.replay import Policy, TraceOnDevice, coded_sets
from foreroute.replay.coded_sets import CodedChoices
from foreroute.trace import IndexerSpec, RoutedLayer
from tests.traces import drawn_choices

LAYERS = (RoutedLayer(1), RoutedLayer(4))


def read(choices, layer):
    """Units by (row, layer, head), as a device reads them."""
    tables = torch.from_numpy(choices.start_S), torch.from_numpy(choices.low_S)
    heads = choices.spec.heads
    units_MHK = choices.units_SK(layer, *tables).view(-1, heads, choices.spec.top_k).tolist()
    rows = [(row, place) for row, place in enumerate(choices.row_N.tolist()) if place >= 0]
    return {(row, layer, head): units_MHK[place][head] for row, place in rows for head in range(heads)}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.integers(1, 20),
    heads=st.integers(1, 3),
    unit=st.integers(1, 3),
    furthest=st.sampled_from([0, 30, 300, 100_000]),
    tile_bits=st.sampled_from([1, 500, 1 << 24]),
)
def test_what_is_read_is_what_was_chosen(seed, top_k, heads, unit, furthest, tile_bits):
    spec, rng = IndexerSpec(top_k, LAYERS, unit, heads), np.random.default_rng(seed)
    position_N = rng.integers(0, furthest + 1, 12)
    stream, sets = drawn_choices(spec, position_N, rng, present=0.8)
    with pytest.MonkeyPatch.context() as tiles:
        tiles.setattr(coded_sets, "TILE_BITS", tile_bits)
        choices = CodedChoices(spec, stream, position_N)
        for layer in range(len(LAYERS)):
            expected = {at: units for at, units in sets.items() if at[1] == layer}
            assert read(choices, layer) == expected


def test_bytes_are_near_the_bound_over_a_causal_window():
    """An eighth of 2,048 choices of 32,768. Plain ids take 4.6 times as many."""
    top_k, window, rng = 256, 4096, np.random.default_rng(0)
    position_N = np.arange(0, window, 15)
    spec = IndexerSpec(top_k, LAYERS[:1])
    stream, _ = drawn_choices(spec, position_N, rng)
    taken = len(CodedChoices(spec, stream, position_N).encoded(0))
    bound = sum(log2(comb(position + 1, top_k)) for position in position_N[position_N >= top_k].tolist()) / 8
    assert 1 <= taken / bound <= 1.2
    last = stream.take(np.array([len(position_N) - 1]))
    assert len(CodedChoices(spec, last, np.array([window - 1])).encoded(0)) == 192
    assert stream.ids.nbytes / taken > 4.6


@pytest.mark.parametrize(
    ("heads", "last"),
    [(1, lambda ids: 1 << 20), (1, lambda ids: ids[-2]), (2, lambda ids: ids[-1] + 1)],
    ids=["too far", "twice", "of the other head"],
)
def test_choices_that_were_changed_behind_their_check_are_refused(heads, last):
    spec, position_N = IndexerSpec(3, LAYERS, heads=heads), np.array([9, 12])
    stream, _ = drawn_choices(spec, position_N, np.random.default_rng(4))
    assert len(stream.ids)
    stream.ids[-1] = last(stream.ids)
    with pytest.raises(TraceContentError, match=r"decoder 4.*checked"):
        CodedChoices(spec, stream, position_N).encoded(1)


def test_the_highest_experts_of_the_largest_models_are_replayed():
    sizes, ids = [(40_000, 2), (65_535, 1)], [[[39_999, 1], [65_534, -1]], [[5, 32_768], [32_767, -1]]]
    spec = fr.RoutingSpec.of_sizes([fr.RoutedLayer(0), fr.RoutedLayer(1)], sizes)
    # the second sequence has no route
    trace = fr.RoutingTrace.from_sequences(spec, [[1, 2], [3]], [ids, np.full((1, 2, 2), -1)])
    policy = Policy("native", "native", "native", telemetry=False)
    rows = TraceOnDevice(trace, torch.device("cpu")).gather(torch.tensor([0, 1, -1, 2]), policy)
    assert rows.ids_LRK.transpose(0, 1).tolist() == [*ids, *[[[-1, -1]] * 2] * 2]
    assert not rows.is_complete

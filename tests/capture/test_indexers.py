"""Choices of indexers in SGLang's form, put on the rows of a trace."""

import base64

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import with_indexer_choices
from foreroute.errors import CaptureError
from foreroute.trace import IndexerSpec, LayerKind, synthetic_trace
from tests.traces import spec_of

LAYERS = tuple(fr.RoutedLayer(i, LayerKind.ATTENTION) for i in (0, 2))
INDEXERS = IndexerSpec(3, LAYERS)
TRACE = synthetic_trace(spec_of(), [7, 1, 5], seed=0)


def returned(seed=0, *, num_layers=3, indexers=INDEXERS):
    """int32 [T - 1, layers, k] of each sequence, in any order, -1 behind the last; layer 1 has a copy of layer 0."""
    rng, arrays = np.random.default_rng(seed), []
    for length in TRACE.lengths:
        array = np.full((length - 1, num_layers, indexers.top_k), -1, np.int32)
        for p in range(length - 1):
            for layer in range(num_layers):
                ids = rng.permutation((p + 1) // indexers.unit)[: indexers.top_k]
                array[p, layer, : len(ids)] = ids
        if num_layers == 3:
            array[:, 1] = array[:, 0]
        arrays.append(array)
    return arrays


@pytest.mark.parametrize("as_text", [False, True], ids=["arrays", "base64"])
def test_choices_are_those_of_the_layers_with_an_indexer(as_text):
    arrays = returned()
    given = [base64.b64encode(each.tobytes()).decode() for each in arrays] if as_text else arrays
    stream = with_indexer_choices(TRACE, given, INDEXERS, num_layers=3).streams["indexer"]
    assert stream.valid_N.tolist() == [True] * 6 + [False] * 2 + [True] * 4 + [False]
    for s, array in enumerate(arrays):
        for p in range(len(array)):
            for place, layer in enumerate(LAYERS):
                start, stop = stream.offsets[(int(TRACE.offsets[s]) + p) * 2 + place :][:2]
                expected = sorted(array[p, layer.index].tolist()) if p >= 3 else []  # before, all is seen
                assert stream.ids[start:stop].tolist() == expected


def test_compressed_entries_come_by_layers_with_an_indexer_alone():
    entries = IndexerSpec(1, LAYERS, unit=2)
    stream = with_indexer_choices(TRACE, returned(num_layers=2, indexers=entries), entries, num_layers=2).streams[
        "indexer"
    ]
    assert stream.counts_ND[:6].tolist() == [[0, 0]] * 3 + [[1, 1]] * 3


def changed(place, value):
    arrays = returned()
    arrays[0][place] = value
    return arrays


REFUSED = {
    "of the pool": (changed((5, 0, 0), 40_000), "go from -1 to 40000.*SGLANG_DSA_FUSE_TOPK=0"),
    "not seen yet": (changed((1, 0), [0, 5, -1]), "some that it does not see.*SGLANG_DSA_FUSE_TOPK=0"),
    "twice": (changed((5, 0), [2, 2, 0]), "twice"),
    "too few": (changed((5, 0), [2, 0, -1]), "has 2 choices.*SGLANG_DSA_FUSE_TOPK=0"),
    "one row less": ([returned()[0][:-1], *returned()[1:]], "expected integers .6, 3, k."),
    "one sequence less": (returned()[:2], "choices of 2 sequences for 3"),
    "no base64": (["!", *returned()[1:]], "no base64 of int32"),
    "cut": ([base64.b64encode(b"\0" * 68).decode(), *returned()[1:]], "17 numbers; expected a multiple of 6 rows x 3"),
    "floats": ([returned()[0].astype(float), *returned()[1:]], "float64 of shape"),
}


@pytest.mark.parametrize("broken", REFUSED)
def test_what_cannot_be_choices_of_these_sequences_is_refused(broken):
    given, message = REFUSED[broken]
    with pytest.raises(CaptureError, match=message):
        with_indexer_choices(TRACE, given, INDEXERS, num_layers=3)


def test_layers_that_an_engine_does_not_return_are_refused():
    with pytest.raises(CaptureError, match=r"returns 1 layers, .* indexers of 1 heads in layers \[0, 2\]"):
        with_indexer_choices(TRACE, returned(), INDEXERS, num_layers=1)

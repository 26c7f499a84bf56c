"""Choices of indexers in SGLang's form, put on the rows of a trace."""

import base64
import json

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode, with_indexer_choices
from foreroute.errors import CaptureError
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import IndexerSpec, LayerKind
from tests import wires
from tests.traces import sets_of, spec_of

LAYERS = tuple(fr.RoutedLayer(i, LayerKind.ATTENTION) for i in (0, 2))
INDEXERS = IndexerSpec(3, LAYERS)
TRACE = synthetic_trace(spec_of(), [7, 1, 5], seed=0)


def drawn(num_rows, num_layers, indexers=INDEXERS):
    """int32 [rows, layers, k] in any order, -1 behind the last; of three layers, the second copies the first."""
    rng, array = np.random.default_rng(0), np.full((num_rows, num_layers, indexers.top_k), -1, np.int32)
    for p, layer in np.ndindex(array.shape[:2]):
        ids = rng.permutation((p + 1) // indexers.unit)[: indexers.top_k]
        array[p, layer, : len(ids)] = ids
    if num_layers == 3:
        array[:, 1] = array[:, 0]
    return array


def returned(num_layers=3, indexers=INDEXERS):
    return [drawn(length - 1, num_layers, indexers) for length in TRACE.lengths]


@pytest.mark.parametrize("as_text", [False, True], ids=["arrays", "base64"])
def test_choices_are_those_of_the_layers_with_an_indexer(as_text):
    arrays = returned()
    given = [base64.b64encode(each.tobytes()).decode() for each in arrays] if as_text else arrays
    stream = with_indexer_choices(TRACE, given, INDEXERS).streams["indexer"]
    expected = []
    for array in arrays:  # before the fourth token all is seen
        expected += [[sorted(row[i.index].tolist()) if p >= 3 else [] for i in LAYERS] for p, row in enumerate(array)]
        expected.append(None)
    assert sets_of(stream) == expected


def changed(place, value):
    arrays = returned()
    arrays[0][place] = value
    return arrays


R = wires.rollout(np.random.default_rng(5), prompt=7, response=5)
LENGTH = len(R.tokens)
OWN = drawn(LENGTH - 1, len(LAYERS))


def sglang(choices):
    more = {} if choices is None else {"indexer_topk": base64.b64encode(choices.tobytes()).decode()}
    return wires.sglang_answer(R, **more) | {"prompt_token_ids": R.prompt}


@pytest.mark.parametrize("num_layers", [R.num_layers, len(LAYERS)], ids=["all", "own"])
def test_an_answer_of_sglang_brings_its_choices(num_layers):
    array, without = drawn(LENGTH - 1, num_layers), decode(sglang(None), model=R.spec)
    expected = with_indexer_choices(without, [array], INDEXERS)
    assert decode(json.dumps(sglang(array)), model=R.spec, indexers=INDEXERS).equals(expected)
    in_process = wires.sglang_answer(R, indexer_topk=array) | {"prompt_token_ids": R.prompt}
    assert decode(in_process, model=R.spec, indexers=INDEXERS).equals(expected)


def put(given, indexers=INDEXERS):
    return lambda: with_indexer_choices(TRACE, given, indexers)


def read(answer, indexers=INDEXERS):
    return lambda: decode(answer, model=R.spec, indexers=indexers)


NUMBER = wires.sglang_answer(R, indexer_topk=3) | {"prompt_token_ids": R.prompt}
REFUSED = {
    "of the pool": (put(changed((5, 0, 0), 40_000)), "go from -1 to 40000.*SGLANG_DSA_FUSE_TOPK=0"),
    "not seen yet": (put(changed((1, 0), [0, 5, -1])), r"not see.*SGLANG_DSA_FUSE_TOPK=0"),
    "too few": (put(changed((5, 0), [2, 0, -1])), "has 2 choices.*SGLANG_DSA_FUSE_TOPK=0"),
    "one row less": (put([returned()[0][:-1], *returned()[1:]]), "have 5 rows; expected 6"),
    "no base64": (put(["!", *returned()[1:]]), r"not base64"),
    "of one token": (put([returned()[0], "AAAAAAAAAAA=", returned()[2]]), "sequence 1 are 8 bytes"),
    "floats": (put([returned()[0].astype(float), *returned()[1:]]), "dtype float64; expected integers"),
    "no indexers": (put(returned(), None), r"IndexerSpec.*layer"),
    "indexers of a number": (put(returned(), 3), r"IndexerSpec.*layer"),
    "indexers of no layer": (put(returned(), IndexerSpec(3, ())), r"IndexerSpec.*layer"),
    "indexers of heads": (put(returned(), IndexerSpec(3, LAYERS, heads=2)), r"IndexerSpec.*layer"),
    "unknown indexers": (read(sglang(OWN), None), r"indexers.*None.*pass indexers="),
    "of some": (read([sglang(OWN), sglang(None)]), r"sequence 1.*no choices"),
    "a number": (read(NUMBER), "base64 of int32"),
}


@pytest.mark.parametrize("broken", REFUSED)
def test_what_cannot_be_choices_of_these_sequences_is_refused(broken):
    call, message = REFUSED[broken]
    with pytest.raises(CaptureError, match=message):
        call()

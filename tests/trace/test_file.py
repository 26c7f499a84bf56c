"""Traces on disk: what comes back, in whole and in part, what is read for it, and what is not accepted."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from benchmarks.trace import CountedBytes
from foreroute.costs.presets import model_preset
from foreroute.errors import SpecMismatchError, TraceContentError, TraceFileError
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import ENCODINGS
from foreroute.trace.file import FORMAT, cut_chunks, encode
from tests.traces import mixed_trace, random_trace, spec_of, uneven_trace, with_decisions

ARCHIVED = Path(__file__).parent / "data" / "trace-3.safetensors"


def bytes_of(trace, encoding="sets"):
    return FORMAT.to_bytes(*encode(trace, encoding))


@contextmanager
def small_chunks(are_small=True):
    with pytest.MonkeyPatch.context() as patched:
        if are_small:
            patched.setattr("foreroute.trace.file.CHUNK_ROWS", 8)
            patched.setattr("foreroute.trace.file.MOST_CHUNK_ROWS", 16)
        yield


MAKERS = [
    mixed_trace,
    uneven_trace,
    *(partial(random_trace, num_experts=e, top_k=k) for e, k in ((1, 1), (256, 8), (300, 3), (65_536, 2))),
    *(partial(uneven_trace, sizes=sizes) for sizes in (((255, 2), (1, 1)), ((256, 4), (256, 1), (3, 3)))),
]
"""Ids of either width, with fillers and without."""


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    encoding=st.sampled_from(ENCODINGS),
    make=st.sampled_from(MAKERS),
    decisions=st.booleans(),
    small=st.booleans(),
    data=st.data(),
)
def test_what_was_saved_is_read_in_whole_and_in_part(seed, encoding, make, decisions, small, data):
    trace = make(seed)
    trace = (with_decisions(trace, seed) if decisions else trace).with_provenance(engine="ünïcode", note="")
    with small_chunks(small):
        assert len(cut_chunks(trace)) >= small * trace.num_rows / 16
        content, expected = bytes_of(trace, encoding), trace.without_pick_order() if encoding == "sets" else trace
        assert content == bytes_of(replace(trace, streams=dict(reversed(trace.streams.items()))), encoding)
    read = fr.load(CountedBytes(content))
    assert read.equals(expected)
    assert (read.spec, read.spec.model, read.provenance) == (trace.spec, "test", trace.provenance)
    sequences = data.draw(st.lists(st.integers(0, len(trace) - 1), max_size=5))
    layers = data.draw(st.lists(st.sampled_from(trace.spec.layers), min_size=1, unique=True))
    names = data.draw(st.lists(st.sampled_from(sorted(trace.streams)), unique=True)) if trace.streams else []
    part = fr.load(CountedBytes(content), sequences=sequences, layers=layers, streams=names)
    others = set(trace.streams) - set(names)
    wanted = expected.without_streams(*others) if others else expected
    assert part.equals(wanted.select(sequences).select_layers(layers))


def test_a_file_of_this_format_is_read_for_as_long_as_it_is_format_3():
    """The file was written when format 3 was made: whoever changes the format sees it here."""
    trace = fr.load(ARCHIVED)
    assert trace.equals(archived().without_pick_order())
    assert trace.provenance == archived().provenance


def archived():
    """A trace by plain arithmetic, which depends on no random generator: every kind of layer, row and stream."""
    kinds = tuple(fr.LayerKind)
    spec = fr.RoutingSpec(300, 3, tuple(fr.RoutedLayer(i, kinds[i % len(kinds)]) for i in range(5)), model="archive")
    rows = np.arange(40)[:, None, None] * 7 + np.arange(5)[:, None] * 11
    ids_NLK = (rows + np.array([200, 0, 100])) % 300
    trace = fr.RoutingTrace.from_rows(
        spec,
        [np.arange(30), [], np.arange(10) + 5],
        [ids_NLK[:30], ids_NLK[:0], ids_NLK[30:]],
        valid=[np.arange(30) % 9 < 8, [], np.arange(10) < 9],
        weight_versions=[np.arange(30) // 16, [], np.full(10, 3)],
        provenance={"engine": "archive", "note": "ünïcode"},
    )
    sets = fr.trace.DecisionStream.from_sets(500, np.arange(40) % 2, np.arange(40) % 2 * 3, np.arange(60) * 5)
    decided = np.arange(40) < 30
    counts_ND = np.stack([decided, decided], axis=1).astype(int)
    choices = fr.trace.DecisionStream.from_sets(2**31 - 1, decided, counts_ND, np.arange(60), layers=spec.layers[:2])
    return trace.with_stream("sampling", sets).with_stream("indexer", choices)


def test_parts_that_are_not_there_are_refused(tmp_path):
    trace = random_trace(0)
    path = fr.save(trace, tmp_path / "t")
    for part, error, words in (
        ({"sequences": [len(trace)]}, TraceContentError, "sequences hold"),
        ({"layers": [fr.RoutedLayer(7)]}, SpecMismatchError, r"routes.*decoder 7"),
        ({"layers": []}, TraceContentError, "layer table"),
        *(({"layers": layers}, TraceContentError, "routed layers") for layers in (fr.RoutedLayer(1), 1, [1])),
        ({"streams": ["masks"]}, TraceContentError, r"stream 'masks'.*routes"),
    ):
        with pytest.raises(error, match=words):
            fr.load(path, **part)


@small_chunks()
def test_a_part_is_checked_and_the_rest_is_not_read():
    trace = with_decisions(synthetic_trace(spec_of(), [8, 8, 8], seed=1), 1)
    metadata, tensors = encode(trace, "sets")
    ends = np.cumsum(tensors["frame_bytes"].reshape(-1)).reshape(tensors["frame_bytes"].shape)
    assert len(ends) == 3
    frames = tensors["frames"].copy()
    frames[ends[1, 2] - 6] ^= 1  # sequence 1, layer 1
    content, expected = FORMAT.to_bytes(metadata, {**tensors, "frames": frames}), trace.without_pick_order()
    assert fr.load(CountedBytes(content), sequences=[0, 2]).equals(expected.select([0, 2]))
    layers = [trace.spec.layers[2], trace.spec.layers[0]]
    assert fr.load(CountedBytes(content), layers=layers).equals(expected.select_layers(layers))
    with pytest.raises(TraceFileError, match=r"frame 2.*1.*written"):
        fr.load(CountedBytes(content), sequences=[1])
    whole, part = CountedBytes(bytes_of(trace)), CountedBytes(bytes_of(trace))
    fr.load(whole)
    fr.load(part, sequences=[2], layers=layers[:1], streams=[])
    header = len(content) - len(frames)
    assert part.count - header == int(tensors["frame_bytes"][2, [0, 3]].sum())
    assert whole.count == len(content)


def test_a_token_takes_the_bytes_that_the_page_says(tmp_path):
    """docs/sizing.md."""
    model = model_preset("qwen3-30b-a3b")
    spec = fr.RoutingSpec(model.num_experts, model.top_k, tuple(fr.RoutedLayer(i) for i in range(model.num_layers)))
    trace = synthetic_trace(spec, [1000, 1000], seed=0)
    arrays = (trace.expert_ids_NLK, trace.token_ids_N, trace.weight_versions_N, trace.valid_N)
    assert sum(array.nbytes for array in arrays) == trace.num_rows * (model.num_layers * model.top_k + 9)
    stored = fr.save(trace, tmp_path / "trace.safetensors").stat().st_size / trace.num_rows
    assert stored == pytest.approx(5.2 * model.num_layers, rel=0.05)

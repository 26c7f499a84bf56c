"""Every rule of docs/formats.md that binds a reader: a file that breaks one is refused, its right seals or not."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save as to_bytes

import foreroute as fr
from foreroute.errors import TraceContentError, TraceFileError
from foreroute.trace import synthetic_trace
from foreroute.trace.checks import as_offsets, ascending, join_ranges
from tests.trace.forging import STAIRCASE, forged, setting
from tests.traces import random_trace, spec_of


def staircase(end):
    return np.array([*STAIRCASE, end], np.int64)


@pytest.mark.parametrize("sequences", [None, [0], [1], [3]])
def test_run_offsets_whose_differences_wrap_are_refused(tmp_path, sequences):
    trace = random_trace(0)
    path = forged(tmp_path / "t", trace, setting(run_offsets=staircase(len(trace))))
    with pytest.raises(TraceFileError, match="run_offsets do not go from 0 to the number of runs"):
        fr.load(path, sequences=sequences)


def test_offsets_are_compared_and_not_subtracted():
    assert ascending(np.array([0, 0, 3, 3]), 3)
    for wrong in (staircase(3), np.array([0, 3, 1, 3]), np.array([1, 3]), np.array([0, 2]), np.zeros(0, np.int64)):
        assert not ascending(wrong, 3)
    assert not ascending(np.array([0.0, 3.0]), 3)
    assert not ascending(np.array([[0, 3]]), 3)


def test_lengths_whose_sum_wraps_are_refused():
    for lengths in ([2**63 - 1, 2**63 - 1, 7], [3, -1], [2**62, 2**62]):
        with pytest.raises(TraceContentError, match="lengths"):
            as_offsets(np.array(lengths, np.int64))
        with pytest.raises(TraceContentError, match="lengths"):
            join_ranges(np.zeros(len(lengths), np.int64), np.array(lengths, np.int64))


def metadata(**values):
    """A change of metadata; None takes a key away."""

    def change(there, tensors):
        for name, value in values.items():
            there[f"foreroute.{name}"] = value
            if value is None:
                del there[f"foreroute.{name}"]

    return change


def spec(**values):
    """A change of the model; None takes a field away."""

    def change(there, tensors):
        fields = {**json.loads(there["foreroute.spec"]), **values}
        there["foreroute.spec"] = json.dumps({name: value for name, value in fields.items() if value is not None})

    return change


def places(name, value, *, at=0):
    """A change of one number of a tensor."""

    def change(there, tensors):
        tensors[name].reshape(-1)[at] = value

    return change


def adds(name, bits, *, at):
    """A change of some bits of a number of a tensor."""

    def change(there, tensors):
        tensors[name].reshape(-1)[at] |= tensors[name].dtype.type(bits)

    return change


def unrouted_block_with_a_payload(there, tensors):
    tensors["valid_bits"][:] = 0
    tensors["span_starts"], tensors["span_versions"] = np.array([0]), np.array([-1], np.int32)


METADATA = {
    "a key is missing": (metadata(codec=None), "missing: foreroute.codec"),
    "another key of ours": (metadata(extra="1"), "unknown: foreroute.extra"),
    "another codec": (metadata(codec="zip"), "codec 'zip' is unknown"),
    "another pick order": (metadata(pick_order="lost"), "pick order cannot be 'lost'"),
    "planes that keep order": (metadata(codec="planes"), "code_lengths is missing"),
    "a digest of something else": (lambda there, tensors: None, None),
    "provenance is no object": (metadata(provenance='["x"]'), "expected a table of texts"),
    "provenance of numbers": (metadata(provenance='{"steps": 3}'), "expected a table of texts"),
    "provenance with half a character": (metadata(provenance='{"x": "\\ud800"}'), "expected a table of texts"),
    "deep provenance": (metadata(provenance="[" * 9000), "nested too deep"),
    "the model is no object": (metadata(spec="[]"), "expected num_experts, top_k, layers and model"),
    "a fact of the model is missing": (spec(model=None), "expected num_experts, top_k, layers and model"),
    "another fact of the model": (spec(hidden=3), "expected num_experts, top_k, layers and model"),
    "experts as text": (spec(num_experts="8"), "num_experts is '8'"),
    "experts as fraction": (spec(num_experts=8.0), "num_experts is 8.0"),
    "no expert": (spec(num_experts=0), "num_experts is 0"),
    "too many experts": (spec(num_experts=65_537), "num_experts is 65537"),
    "half a pick": (spec(top_k=2.5), "top_k is 2.5"),
    "more picks than experts": (spec(top_k=9), "top_k is 9"),
    "true as a pick": (spec(top_k=True), "top_k is True"),
    "no layer": (spec(layers=[]), "the layer table is empty"),
    "a layer twice": (spec(layers=[[0, "decoder"]] * 3), "names a layer twice"),
    "a negative layer": (spec(layers=[[-4, "decoder"], [1, "decoder"], [2, "decoder"]]), "number -4"),
    "a fraction of a layer": (spec(layers=[[2.9, "decoder"], [1, "decoder"], [3, "decoder"]]), "number 2.9"),
    "a layer of another kind": (spec(layers=[[0, "sideways"]] * 3), r"expected \[number, kind\]"),
    "a layer without a kind": (spec(layers=[[0]] * 3), r"expected \[number, kind\]"),
    "layers as table": (spec(layers={"0": "decoder"}), "expected a list"),
    "too many layers": (spec(layers=[[i, "decoder"] for i in range(1025)]), "1024 layers at most"),
    "too many experts in all": (
        spec(num_experts=65_536, layers=[[i, "decoder"] for i in range(17)]),
        "17 layers of 65536 experts",
    ),
    "a model's name that is none": (spec(model=3), "the model's name is 3"),
    "half a character in the model's name": (spec(model="\ud800"), "expected text"),
}

TENSORS = {
    "run_offsets of two axes": (setting(run_offsets=np.zeros((1, 5), np.int64)), "tensor run_offsets is"),
    "run_offsets of 32 bits": (setting(run_offsets=np.zeros(5, np.int32)), "tensor run_offsets is int32"),
    "run_offsets from 1": (places("run_offsets", 1), "run_offsets do not go from 0"),
    "run_offsets that fall": (places("run_offsets", 4, at=1), "run_offsets do not go from 0"),
    "a run before the rows": (places("run_starts", -1), "a run leaves the"),
    "an empty run": (places("run_lengths", 0), "a run leaves the"),
    "a run past the rows": (places("run_lengths", 2**63 - 1), "a run leaves the"),
    "block_starts from 1": (places("block_starts", 1), "do not tile"),
    "block_starts past the rows": (places("block_starts", 99, at=-1), "do not tile"),
    "span_starts from 1": (places("span_starts", 1), "spans do not tile"),
    "span_starts that stand": (places("span_starts", 0, at=1), "spans do not tile"),
    "span_starts past the rows": (places("span_starts", 99, at=-1), "spans do not tile"),
    "a version too few": (setting(span_versions=np.zeros(1, np.int32)), "spans do not tile"),
    "a weight version below -1": (places("span_versions", -7), "a weight version is -7"),
    "a version of an absent row": (
        setting(span_starts=np.array([0]), span_versions=np.array([3], np.int32)),
        "a row without routes states a weight version",
    ),
    "a negative token": (places("token_ids", -100), "a token id is -100"),
    "a byte of validity too many": (setting(valid_bits=np.zeros(9, np.uint8)), "do not tile"),
    "bits past the rows": (adds("valid_bits", 128, at=-1), "bits past the"),
    "words that do not add up": (places("payload_words", 99), "does not add up"),
    "a payload of another size": (
        setting(payload_words=np.array([[2, 2, 1]], np.uint32), payloads=np.zeros(5, np.uint64)),
        "words for",
    ),
    "a payload without a routed row": (unrouted_block_with_a_payload, "has payloads but no routed row"),
    "a closing word that is not 0": (places("payloads", 1, at=-1), "bits follow the last row"),
    "bits after the last row": (adds("payloads", 2**63, at=-2), "bits follow the last row"),
    "an expert twice": (places("payloads", 0, at=0), "an expert twice"),
    "a seal too few": (lambda there, tensors: tensors.update(row_seals=np.zeros((0, 16), np.uint8)), None),
    "another tensor": (setting(extra=np.zeros(3)), "unknown: extra"),
    "code books without a use": (setting(code_lengths=np.ones((1, 1), np.uint8)), "has no code_lengths"),
}


@pytest.mark.parametrize("broken", [*METADATA, *TENSORS])
def test_a_file_that_breaks_a_rule_is_refused(tmp_path, broken):
    change, message = {**METADATA, **TENSORS}[broken]
    trace = random_trace(0)
    path = forged(tmp_path / "t", trace, change)
    if message is None:
        assert fr.load(path).equals(trace)  # the control: sealing anew alone is no offence
        return
    with pytest.raises(TraceFileError, match=message):
        fr.load(path)


def test_another_version_is_refused_before_anything_else(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(to_bytes({"anything": np.zeros(2)}, metadata={"foreroute.version": "3", "foreroute.other": "x"}))
    with pytest.raises(TraceFileError, match="has trace format 3"):
        fr.load(path)


def test_keys_of_others_are_left_alone(tmp_path):
    trace = random_trace(0)
    path = forged(tmp_path / "t", trace, lambda there, tensors: there.update({"mine": "x"}))
    assert fr.load(path).equals(trace)


def test_every_kind_of_layer_is_read(tmp_path):
    kinds = tuple(fr.RoutedLayer(0, kind) for kind in fr.trace.LayerKind)
    trace = synthetic_trace(fr.RoutingSpec(4, 2, kinds), [3], seed=0)
    assert fr.load(fr.save(trace, tmp_path / "t")).spec.layers == kinds


@pytest.mark.parametrize("codec", ["raw", "packed"])
def test_ids_ascend_where_pick_order_was_dropped(tmp_path, codec):
    trace = random_trace(0)
    path = forged(tmp_path / "t", trace, metadata(pick_order="dropped"), codec=codec)
    with pytest.raises(TraceFileError, match="does not ascend, though pick order was dropped"):
        fr.load(path)
    sound = forged(tmp_path / "s", trace.without_pick_order(), metadata(pick_order="dropped"), codec=codec)
    assert fr.load(sound).equals(trace.without_pick_order())


def test_ids_of_as_many_experts_as_there_are_or_more_are_refused(tmp_path):
    trace = random_trace(0, num_experts=5, top_k=1)
    with pytest.raises(TraceFileError, match="an id of 5 or more"):
        fr.load(forged(tmp_path / "t", trace, places("payloads", 7)))


def planes_trace():
    """One block of enough rows for a table of ranks, whose last word is not full."""
    return synthetic_trace(spec_of(num_experts=5, top_k=2, num_layers=1), [120], seed=1, complete=True)


@pytest.mark.parametrize(
    ("word", "bits"),
    [(-1, 1), (-2, 1 << 63), (2, 1 << 63), (2, 1), (0, 1 << 62)],
    ids=["closing word", "after the stream", "after the ranks", "a rank twice", "the end of a lane"],
)
def test_planes_hold_nothing_that_the_format_does_not_name(tmp_path, word, bits):
    def change(there, tensors):
        tensors["payloads"][word] ^= np.uint64(bits)

    trace = planes_trace()
    path = forged(tmp_path / "t", trace, change, codec="planes")
    with pytest.raises(TraceFileError, match="does not decode"):
        fr.load(path)
    assert fr.load(fr.save(trace, tmp_path / "s", codec="planes")).equals(trace.without_pick_order())


@pytest.mark.parametrize("lengths", [0, 12, 2])
def test_code_books_are_complete(tmp_path, lengths):
    path = forged(tmp_path / "t", planes_trace(), places("code_lengths", lengths), codec="planes")
    with pytest.raises(TraceFileError, match="not a complete prefix code"):
        fr.load(path)


def test_sequences_of_more_than_64_times_the_stored_rows_are_refused(tmp_path):
    trace = random_trace(0)

    def repeat(there, tensors):
        stored = len(tensors["token_ids"])
        tensors["run_starts"] = np.zeros(65, np.int64)
        tensors["run_lengths"] = np.full(65, stored, np.int64)
        tensors["run_offsets"] = np.arange(66)

    with pytest.raises(TraceFileError, match="more than 64 times"):
        fr.load(forged(tmp_path / "t", trace, repeat))


def test_routes_of_far_more_memory_than_the_file_are_neither_written_nor_read(tmp_path, monkeypatch):
    """Rows without a route take 4 bytes in the file, and as much as any others in memory."""
    spec = fr.RoutingSpec(64, 16, tuple(map(fr.RoutedLayer, range(1024))))
    trace = fr.RoutingTrace.unrouted(spec, [np.zeros(1200, np.int32)])
    with pytest.raises(TraceContentError, match="4800 bytes of tokens and payloads would become 19660800"):
        fr.save(trace, tmp_path / "t")
    monkeypatch.setattr("foreroute.trace.file.writing.check_memory", lambda *_: None)
    fr.save(trace, tmp_path / "t")
    with pytest.raises(TraceFileError, match="4800 bytes of tokens and payloads would become 19660800"):
        fr.load(tmp_path / "t")


def test_a_header_of_more_than_a_mebibyte_is_refused_before_it_is_parsed(tmp_path):
    header = json.dumps({"__metadata__": {"foreroute.version": "2", "x": "[" * (1 << 20)}}).encode()
    (tmp_path / "t").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(TraceFileError, match="1048576 at most"):
        fr.load(tmp_path / "t")
    with pytest.raises(TraceContentError, match="shorten the provenance"):
        fr.save(random_trace(0).with_provenance(log="x" * (1 << 20)), tmp_path / "u")


@pytest.mark.parametrize(
    ("column", "at", "value", "message"),
    [
        ("token_ids_N", 0, -1, "expected token ids"),
        ("weight_versions_N", 0, -2, "-1 where not stated"),
        ("weight_versions_N", -1, 3, "a row without routes states a weight version"),
    ],
)
def test_what_a_reader_refuses_is_not_written(tmp_path, column, at, value, message):
    trace = random_trace(0)
    getattr(trace, column)[at] = value
    with pytest.raises(TraceContentError, match=message):
        fr.save(trace, tmp_path / "t")
    for facts in ({"engine": 3}, {"engine": "\udcff"}):
        with pytest.raises(TraceContentError, match="provenance has 'engine'"):
            fr.save(random_trace(0).with_provenance(**facts), tmp_path / "t")
    assert not list(tmp_path.iterdir())

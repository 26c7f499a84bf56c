"""Decisions beside the routes: cut, joined, saved and read with their rows, against plain Python lists."""

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import foreroute as fr
from foreroute.errors import SpecMismatchError, TraceContentError, TraceFileError
from foreroute.trace import (
    CODECS,
    SAMPLING,
    DecisionStream,
    TraceStore,
    digest,
    encoded_size,
    extended,
    synthetic_trace,
)
from foreroute.trace.file.writing import encode_trace
from tests.trace.forging import forged, setting
from tests.traces import mixed_trace, random_sets, random_trace, similar_sets, spec_of, with_decisions


def sets_of(stream):
    """The oracle's view: for each row None, or a list of ids for each layer."""
    pieces = [piece.tolist() for piece in np.split(stream.ids, stream.offsets[1:-1])] if len(stream.offsets) > 1 else []
    by_row = [pieces[n * stream.depth : (n + 1) * stream.depth] for n in range(stream.num_rows)]
    return [sets if valid else None for sets, valid in zip(by_row, stream.valid_N, strict=True)]


def rows_of(trace):
    """Each sequence as a list of all decisions of its rows."""
    names = sorted(trace.streams)
    weights = [None] * trace.num_rows if trace.gate_weights_NLK is None else trace.gate_weights_NLK.tolist()
    columns = [trace.token_ids_N.tolist(), weights, *[sets_of(trace.streams[name]) for name in names]]
    rows = list(zip(*columns, strict=True))
    return [rows[a:b] for a, b in zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_every_operation_carries_every_stream(seed, data):
    a, b = with_decisions(random_trace(seed), seed), with_decisions(random_trace(seed + 1), seed + 1)
    chosen = data.draw(st.lists(st.integers(0, len(a) - 1), max_size=6))
    assert rows_of(a.select(chosen)) == [rows_of(a)[s] for s in chosen]
    assert rows_of(fr.concatenate([a, b])) == rows_of(a) + rows_of(b)
    c = a.select(np.arange(len(a))[::-1])
    assert rows_of(a.continued_by(c)) == [x + y for x, y in zip(rows_of(a), rows_of(c), strict=True)]
    some = a.select_layers(a.spec.layers[1:])
    assert some.without_gate_weights().streams.keys() == a.streams.keys()
    assert np.array_equal(some.gate_weights_NLK, a.gate_weights_NLK[:, 1:])
    for same in (a.with_weight_version(3), a.with_provenance(engine="x")):
        assert rows_of(same) == rows_of(a)
    sorted_picks = a.without_pick_order()
    assert [sets_of(stream) for stream in sorted_picks.streams.values()] == [sets_of(s) for s in a.streams.values()]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_cut_drops_the_mask_of_the_token_that_it_cuts_off(seed, data):
    trace = with_decisions(random_trace(seed), seed)
    kept = [data.draw(st.integers(0, int(n))) for n in trace.lengths]
    expected = [list(rows[:n]) for rows, n in zip(rows_of(trace), kept, strict=True)]
    for rows, n, whole in zip(expected, kept, trace.lengths, strict=True):
        if 0 < n < whole:
            rows[-1] = (*rows[-1][:-1], None)  # the names ascend: sampling is the last column
    assert rows_of(trace.truncated(kept)) == expected


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), replace_routed=st.booleans())
def test_a_later_turn_adds_to_the_decisions_of_an_earlier_one(seed, replace_routed):
    whole, other = with_decisions(random_trace(seed), seed), with_decisions(random_trace(seed), seed + 1)
    earlier = whole.truncated(whole.lengths // 2)
    both = extended(earlier, other, replace_routed=replace_routed)
    for name, stream in both.streams.items():
        first, second = rows_in(earlier.streams[name], earlier, other), sets_of(other.streams[name])
        pairs = zip(first, second, strict=True)
        expected = [y if (replace_routed and y is not None) or x is None else x for x, y in pairs]
        assert sets_of(stream) == expected


def rows_in(stream, trace, longer):
    """The sets of a trace at the rows of a longer one."""
    rows, sets = [None] * longer.num_rows, sets_of(stream)
    for s in range(len(trace)):
        start, own = int(longer.offsets[s]), sets[int(trace.offsets[s]) : int(trace.offsets[s + 1])]
        rows[start : start + len(own)] = own
    return rows


def test_layouts_move_a_stream_by_rows_and_pad_with_no_decision():
    stream = random_sets(np.random.default_rng(0), 9, 50, layers=(fr.RoutedLayer(1), fr.RoutedLayer(4)))
    rows = np.array([3, -1, 0, 8, 8, -1])
    expected = [None if row < 0 else sets_of(stream)[row] for row in rows]
    assert sets_of(stream.take(rows)) == expected
    assert sets_of(stream.take(np.zeros(0, np.int64))) == []


def test_traces_with_and_without_a_stream_do_not_mix_by_accident():
    spec = spec_of()
    plain, tool = synthetic_trace(spec, [4], seed=0), fr.RoutingTrace.unrouted(spec, [[5, 6]])
    masks = DecisionStream.from_sets(50, [0, 1, 1, 0], [0, 2, 1, 0], [7, 3, 9])
    masked = plain.with_stream(SAMPLING, masks)
    assert sets_of(masked.continued_by(tool).streams[SAMPLING]) == [None, [[3, 7]], [[9]], None, None, None]
    with pytest.raises(TraceContentError, match="some of the traces have the stream sampling"):
        fr.concatenate([masked, plain])
    absent = plain.with_stream(SAMPLING, DecisionStream.absent(50, 4))
    assert fr.concatenate([absent, masked]).streams[SAMPLING].valid_N.tolist() == [False] * 5 + [True] * 2 + [False]
    with pytest.raises(SpecMismatchError, match="51 choices"):
        fr.concatenate([masked, plain.with_stream(SAMPLING, DecisionStream.absent(51, 4))])
    assert fr.concatenate([masked.without_streams(), plain]).streams == {}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids": [1, 1, 4]}, "row 0 has id 1 twice"),
        ({"ids": [1, 2, 50]}, "ids go from 1 to 50; expected 0 to 49"),
        ({"ids": [1, -2, 4]}, "ids go from -2"),
        ({"ids": [1, 2.5, 4]}, "float64 ids"),
        ({"ids": [1, 2]}, "3 ids by their counts, and 2 are there"),
        ({"counts": [2, 1]}, r"expected integer counts \[3, 1\]"),
        ({"counts": [3, -1, 1]}, "lengths must be 0 or more"),
        ({"valid": [1, 0, 0]}, "a row without a decision has ids"),
        ({"valid": [0.5, 1, 1]}, "expected bools"),
        ({"num_choices": 0}, "num_choices is 0"),
        ({"num_choices": 2**31}, "num_choices is 2147483648"),
        ({"layers": [fr.RoutedLayer(1)] * 2}, "2 layers decide"),
    ],
)
def test_impossible_sets_are_refused(changed, message):
    good = {"num_choices": 50, "valid": [1, 0, 1], "counts": [2, 0, 1], "ids": [4, 1, 3]}
    assert sets_of(DecisionStream.from_sets(**good)) == [[[1, 4]], None, [[3]]]
    with pytest.raises(TraceContentError, match=message):
        DecisionStream.from_sets(**{**good, **changed})


def test_a_set_of_all_choices_left_nothing_out():
    stream = DecisionStream.from_sets(3, [1, 1, 1, 0], [1, 3, 2, 0], [2, 0, 1, 2, 1, 0])
    assert sets_of(stream) == [[[2]], [[]], [[0, 1]], None]
    assert stream.contain(np.array([2, 1, 2, 0])).tolist() == [True, True, False, False]
    assert stream.contain(np.array([1, 3, -1, 3])).tolist() == [False] * 4


def test_a_stream_has_a_name_and_the_rows_of_its_trace():
    trace = random_trace(0)
    with pytest.raises(TraceContentError, match=f"has 2 rows for {trace.num_rows} of the trace"):
        trace.with_stream(SAMPLING, DecisionStream.absent(50, 2))
    for name in ("gate_weights", "Sampling", "a" * 33, "a.b", "", 3):
        with pytest.raises(TraceContentError, match="a stream is named"):
            trace.with_stream(name, DecisionStream.absent(50, trace.num_rows))


def test_each_stream_has_a_digest_and_the_trace_one_of_all():
    plain = random_trace(0)
    trace, other = with_decisions(plain, 0), with_decisions(plain, 1)
    assert digest(trace) == digest(with_decisions(plain, 0))
    assert digest(trace.without_gate_weights().without_streams()) == digest(plain)
    parts = [trace, other, plain, trace.without_gate_weights(), trace.without_streams(SAMPLING)]
    assert len({digest(part) for part in parts}) == 5
    assert trace.streams[SAMPLING].digest() != other.streams[SAMPLING].digest()
    assert not trace.equals(other)
    assert not trace.equals(trace.without_streams("indexer"))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), codec=st.sampled_from(CODECS), data=st.data())
def test_round_trip_and_parts(seed, codec, data, tmp_path_factory):
    trace = with_decisions(mixed_trace(seed), seed)
    path = fr.save(trace, tmp_path_factory.mktemp("trace") / "t.safetensors", codec=codec)
    trace = trace.without_pick_order() if codec == "planes" else trace
    assert fr.load(path).equals(trace)
    sequences = data.draw(st.lists(st.integers(0, len(trace) - 1), max_size=5))
    layers = data.draw(st.lists(st.sampled_from(trace.spec.layers), min_size=1, unique=True))
    assert fr.load(path, sequences=sequences, layers=layers).equals(trace.select(sequences).select_layers(layers))
    plain = trace.without_gate_weights()
    assert fr.load(path, streams=[]).equals(plain.without_streams())
    assert fr.load(path, streams=["indexer"], sequences=sequences).equals(
        plain.without_streams(SAMPLING).select(sequences)
    )
    with_weights = trace.without_streams().select_layers(layers)
    assert fr.load(path, streams=["gate_weights"], layers=layers).equals(with_weights)


def test_streams_that_are_not_there_are_refused(tmp_path):
    store = TraceStore(tmp_path)
    store.append(with_decisions(random_trace(0), 0, weights=False), step=0)
    assert store.load(0, streams=[SAMPLING]).streams.keys() == {SAMPLING}
    for wanted, message in (("gate_weights", "it has indexer, sampling"), ("masks", "has no stream 'masks'")):
        with pytest.raises(TraceContentError, match=message):
            store.load(0, streams=[wanted])


def test_many_blocks_of_long_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr("foreroute.trace.file.writing.LEAST_ROWS", 8)
    monkeypatch.setattr("foreroute.trace.file.writing.ROWS_PER_EXPERT", 1)
    trace = with_decisions(synthetic_trace(spec_of(), [3, 100, 0, 1, 7, 7, 7, 29, 2], seed=5), 5)
    path = fr.save(trace, tmp_path / "t")
    assert len(load_file(path)["block_starts"]) > 10
    for part in ([1], [8, 0], list(range(9))):
        assert fr.load(path, sequences=part).equals(trace.select(part))


def test_unread_streams_are_neither_read_nor_verified(tmp_path):
    trace = with_decisions(random_trace(0), 0)
    path = fr.save(trace, tmp_path / "t")
    raw = bytearray(path.read_bytes())
    payload = load_file(path)["indexer.payloads"].tobytes()
    raw[raw.index(payload) + 3] ^= 1
    path.write_bytes(raw)
    assert fr.load(path, streams=[SAMPLING]).equals(trace.without_gate_weights().without_streams("indexer"))
    with pytest.raises(TraceFileError, match="a payload of block 0 is not what was written"):
        fr.load(path)


def test_a_shared_prompt_is_stored_once_only_where_all_decisions_agree(tmp_path):
    spec = spec_of()
    prompt = synthetic_trace(spec, [100], seed=0, complete=True).select([0, 0])
    samples = with_decisions(prompt.continued_by(synthetic_trace(spec, [5, 5], seed=1)), 0)
    rows = np.tile(np.arange(105), 2)
    same = samples.take_rows(rows, np.array([105, 105]))

    def stored(trace):
        assert fr.load(fr.save(trace, tmp_path / "t", overwrite=True)).equals(trace)
        return len(load_file(tmp_path / "t")["token_ids"])

    assert stored(same) == 106  # the row of the last token is not routed, and never shared
    weights = same.gate_weights_NLK.copy()
    weights[105 + 40, 1, 1] += 1
    assert stored(same.with_gate_weights(weights)) == 210 - 40
    for name, stream in same.streams.items():
        row = int(np.flatnonzero((stream.counts_ND > 0).all(axis=1))[20])
        gone = stream.without(np.array([105 + row]))
        ids = stream.ids.copy()
        ids[stream.offsets[(105 + row + 1) * stream.depth] - 1] += 1
        for changed in (gone, replace(stream, num_choices=stream.num_choices + 1 - (name == "indexer"), ids=ids)):
            assert stored(same.with_stream(name, changed)) == 210 - row


@pytest.mark.parametrize("codec", CODECS)
def test_routes_alone_take_as_much_as_before_but_256_bytes(codec, tmp_path):
    trace = random_trace(0)
    named = b'"foreroute.streams":"[]"'
    raw = fr.save(trace, tmp_path / "t", codec=codec).read_bytes()
    assert named in raw
    assert len(named) < 256
    assert not any("." in name for name in load_file(tmp_path / "t"))
    masked = trace.with_stream(SAMPLING, DecisionStream.absent(50, trace.num_rows))
    assert encoded_size(masked, codec) - encoded_size(trace, codec) <= 28  # tables of one payload that is empty


def streams_entry(text):
    def change(metadata, tensors):
        metadata["foreroute.streams"] = text

    return change


def of_sampling(**values):
    entry = {"name": "sampling", "codec": "rice", "num_choices": 300, "layers": []} | values
    return f"[{entry}]".replace("'", '"')


def test_sets_like_those_of_the_row_before_are_stored_by_what_changed():
    """And random ones as they are; a row whose set is that of the row before takes a few bits."""
    rng, spec, layers = np.random.default_rng(0), spec_of(), (fr.RoutedLayer(1), fr.RoutedLayer(4))
    trace = synthetic_trace(spec, [400], seed=0, complete=True)
    same = DecisionStream.from_sets(
        2**31 - 1, np.ones(400, bool), np.full((400, 2), 64), np.tile(np.arange(0, 640, 10), 800), layers=layers
    )
    similar, sizes = similar_sets(rng, 400, 5000, layers=layers), {}
    for name, stream in {
        "similar": similar,
        "shuffled": similar.take(rng.permutation(400)),
        "random": random_sets(rng, 400, 2**31 - 1, layers=layers),
        "same": same,
    }.items():
        with_it = trace.with_stream("indexer", stream)
        sizes[name] = encoded_size(with_it, "packed") - encoded_size(trace, "packed")
        (entry,) = json.loads(encode_trace(with_it, "packed")[0]["foreroute.streams"])
        assert entry["codec"] == {"similar": "rice-changes", "same": "rice-changes", "random": "rice"}.get(
            name, entry["codec"]
        )
    assert sizes["similar"] < 0.7 * sizes["shuffled"]
    assert sizes["same"] < 1000  # of 800 sets, with the first ones and all tables


def test_a_few_bytes_of_changes_cannot_ask_for_much_memory(tmp_path):
    """Of a set that is like the one before, an id takes no bits: the ids are bounded before there is room for them."""

    def ask(metadata, tensors):
        tensors["indexer.id_counts"][:] = 2**31 - 1

    trace = with_decisions(random_trace(1), 1, weights=False).without_streams("sampling")
    assert "rice-changes" in encode_trace(trace, "packed")[0]["foreroute.streams"]
    with pytest.raises(TraceFileError, match=r"bytes of tokens and payloads would become \d{10,} bytes"):
        fr.load(forged(tmp_path / "t", trace, ask))


REFUSED = {
    "no list": (streams_entry("{}"), "expected a list of 16"),
    "no JSON": (streams_entry("["), "is not JSON"),
    "too many": (streams_entry("[" + "1," * 16 + "1]"), "expected a list of 16"),
    "no object": (streams_entry("[3]"), "a stream is 3"),
    "another codec": (streams_entry(of_sampling(codec="zip")), "expected name, codec 'rice'"),
    "another name": (streams_entry(of_sampling(name="A")), "a stream is"),
    "weights as sets": (streams_entry(of_sampling(name="gate_weights")), "a stream is"),
    "another fact": (streams_entry(of_sampling(heads=3)), "a stream is"),
    "no choices": (streams_entry(of_sampling(num_choices=0)), "num_choices is 0"),
    "half a choice": (streams_entry(of_sampling(num_choices=2.5)), "num_choices is 2.5"),
    "a layer twice": (streams_entry(of_sampling(layers=[[1, "decoder"]] * 2)), "2 layers decide"),
    "a layer without kind": (streams_entry(of_sampling(layers=[[1]])), "expected .number, kind."),
    "twice": (streams_entry(f"{of_sampling()[:-1]},{of_sampling()[1:]}"), "names a stream twice"),
    "unnamed tensors": (streams_entry("[]"), "unknown: sampling.id_counts"),
    "fewer choices": (streams_entry(of_sampling(num_choices=3)), "sampling in block 0 does not decode"),
    "a missing table": (lambda m, t: t.pop("sampling.id_counts"), "missing: sampling.id_counts"),
    "words of more layers": (setting(**{"sampling.payload_words": np.ones((1, 2), np.uint32)}), "not blocks x layers"),
    "words that do not add up": (setting(**{"sampling.payload_words": np.ones((1, 1), np.uint32)}), "does not add up"),
    "fewer ids": (setting(**{"sampling.id_counts": np.ones((1, 1), np.int64)}), "does not decode"),
    "negative ids": (setting(**{"sampling.id_counts": -np.ones((1, 1), np.int64)}), "id_counts of sampling cannot be"),
    "very many ids": (setting(**{"sampling.id_counts": np.full((1, 1), 2**62)}), "id_counts of sampling cannot be"),
    "counts of more layers": (setting(**{"sampling.id_counts": np.ones((1, 2), np.int64)}), "id_counts of sampling"),
}


@pytest.mark.parametrize("broken", REFUSED)
def test_a_stream_that_breaks_a_rule_is_refused(tmp_path, broken):
    change, message = REFUSED[broken]
    trace = with_decisions(random_trace(1), 1, weights=False).without_streams("indexer")
    with pytest.raises(TraceFileError, match=message):
        fr.load(forged(tmp_path / "t", trace, change))
    assert fr.load(forged(tmp_path / "t", trace, lambda metadata, tensors: None)).equals(trace)


@pytest.mark.parametrize("bits", [np.nan, np.inf])
def test_gate_weights_that_are_no_numbers_are_refused(tmp_path, bits):
    def change(metadata, tensors):
        tensors["gate_weights.payloads"].view(np.float32)[0] = bits

    with pytest.raises(TraceFileError, match="a gate weight is not finite"):
        fr.load(forged(tmp_path / "t", with_decisions(random_trace(1), 1), change))


def test_decisions_in_some_layers_of_a_row_and_none_in_others_are_refused(tmp_path):
    layers = (fr.RoutedLayer(0), fr.RoutedLayer(1))
    trace = synthetic_trace(spec_of(), [3], seed=0)
    trace = trace.with_stream(
        "indexer", DecisionStream.from_sets(9, [1, 1, 0], [[1, 1], [0, 0], [0, 0]], [3, 4], layers=layers)
    )

    def change(metadata, tensors):
        # the second row of layer 0: from "nothing left out", 0 1 0, to "no decision", 1; then both rows after it
        words = tensors["indexer.payloads"]
        assert tensors["indexer.payload_words"].tolist() == [[2, 2]]
        bits = [int(words[0]) >> i & 1 for i in range(64)]
        at = max(i for i, bit in enumerate(bits) if bit) - 2
        assert bits[at - 1 : at + 3] == [0, 1, 0, 1]
        words[0] = np.uint64(sum(bit << i for i, bit in enumerate([*bits[: at - 1], 1, 1])))

    with pytest.raises(TraceFileError, match="has a decision in some layers and none in others"):
        fr.load(forged(tmp_path / "t", trace, change))


def test_few_bytes_do_not_become_many_by_shared_rows(tmp_path, monkeypatch):
    """One row holds a large set, and all sequences are that row."""
    size = 40_000
    trace = synthetic_trace(spec_of(2, 1, 1), [1], seed=0, complete=True)
    masks = DecisionStream.from_sets(size + 1, [1], [size], np.arange(size))
    path = tmp_path / "t"

    def repeat(metadata, tensors):
        tensors["run_starts"], tensors["run_lengths"] = np.zeros(64, np.int64), np.ones(64, np.int64)
        tensors["run_offsets"] = np.arange(65)

    forged(path, trace.with_stream(SAMPLING, masks), repeat)
    assert len(fr.load(path).streams[SAMPLING].ids) == 64 * size  # below 16 MiB
    monkeypatch.setattr("foreroute.trace.checks.DECODED_FREELY", 1 << 20)
    with pytest.raises(TraceFileError, match="bytes of tokens and payloads would become 10240000 bytes"):
        fr.load(path)


def test_an_id_of_as_many_choices_as_there_are_is_refused(tmp_path):
    trace = synthetic_trace(spec_of(), [1], seed=0).with_stream(
        SAMPLING, DecisionStream.from_sets(300, [1], [1], [299])
    )
    assert fr.load(forged(tmp_path / "t", trace, streams_entry(of_sampling()))).equals(trace)
    # one choice less changes no bit of the parameter, so that the same payload holds the same id
    with pytest.raises(TraceFileError, match="sampling in block 0 does not decode"):
        fr.load(forged(tmp_path / "t", trace, streams_entry(of_sampling(num_choices=299))))


@pytest.mark.parametrize(("word", "bit"), [(-1, 0), (-2, 63)], ids=["closing word", "after the last row"])
def test_bits_after_the_last_row_are_refused(tmp_path, word, bit):
    trace = with_decisions(random_trace(1), 1)

    def change(metadata, tensors):
        words = tensors["sampling.payloads"]
        assert not int(words[word]) >> bit & 1
        words[word] |= np.uint64(1 << bit)

    with pytest.raises(TraceFileError, match="sampling in block 0 does not decode"):
        fr.load(forged(tmp_path / "t", trace, change))


def test_many_ids_are_taken_and_read_with_little_memory_beside_them(tmp_path):
    """Choices of indexers are thousands of ids for each row and layer: an index of 8 bytes for each is too much."""
    rows, size = 2000, 2000
    ids = np.tile(np.arange(size, dtype=np.int32), rows)
    stream = DecisionStream.from_sets(2 * size, np.ones(rows, bool), np.full(rows, size), ids)
    path = fr.save(
        fr.RoutingTrace.unrouted(spec_of(), [np.zeros(rows, int)]).with_stream("other", stream), tmp_path / "t"
    )
    fr.load(path)  # which compiles
    reversed_rows = np.arange(rows)[::-1]
    for make, most in ((lambda: stream.take(reversed_rows), 1.7), (lambda: fr.load(path).streams["other"], 2.7)):
        tracemalloc.start()
        made = make()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert made.ids.size == ids.size
        assert peak < most * ids.nbytes

"""Codecs against a plain-Python reader of the documented format, for every width of model."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from foreroute.errors import TraceContentError, TraceFileError
from foreroute.trace.file.codec import CODEC_CLASSES, CODECS
from foreroute.trace.file.codec.prefix_code import MAX_LENGTH, check_lengths, fit_lengths
from foreroute.trace.file.writing import encode_trace
from tests.trace.forging import forged
from tests.trace.payload_oracle import codes_of, read_fixed, read_planes
from tests.traces import random_trace, spec_of

MODELS = [(1, 1), (5, 1), (8, 2), (8, 8), (128, 8), (256, 8), (40, 17), (257, 2), (600, 2), (65536, 1)]


def routes(seed, num_rows, num_experts, top_k, num_layers):
    """Skewed popularity: cubed uniform scores favour low ids, then each layer renames them."""
    rng = np.random.default_rng(seed)
    spec = spec_of(num_experts, top_k, num_layers)
    if num_experts > 1000:
        ids = (rng.random((num_rows, num_layers, 1)) ** 3 * num_experts).astype(spec.id_dtype)
    else:
        scores = rng.random((num_rows, num_layers, num_experts)) * np.arange(1, num_experts + 1) ** -0.5
        ids = np.argsort(-scores, axis=-1)[..., :top_k].astype(spec.id_dtype)
    return spec, np.ascontiguousarray(ids)


def encoded(name, spec, ids, rows):
    codec = CODEC_CLASSES[name].fitted(spec, ids, [rows])
    words, sizes = codec.encode(ids, rows)
    return codec, words, sizes, np.cumsum(sizes) - sizes


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(CODECS),
    model=st.sampled_from(MODELS),
    num_rows=st.integers(1, 90),
    num_layers=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_and_plain_python_reader(name, model, num_rows, num_layers, seed):
    spec, ids = routes(seed, num_rows, *model, num_layers)
    rows = np.random.default_rng(seed).permutation(num_rows)
    codec, words, sizes, starts = encoded(name, spec, ids, rows)
    out = np.zeros_like(ids)
    CODEC_CLASSES[name](spec, codec.tables).decode(words, starts, sizes, rows, np.arange(num_layers), out)
    expected = ids if codec.keeps_order else np.sort(ids, axis=-1)
    assert np.array_equal(out, expected)
    layer = seed % num_layers
    payload = words[starts[layer] : starts[layer] + sizes[layer]]
    if name == "planes":
        read = read_planes(payload, num_rows, *model, codec.tables["code_lengths"].tolist())
    else:
        width = 8 * ids.itemsize if name == "raw" else max(1, (model[0] - 1).bit_length())
        read = read_fixed(payload, num_rows, model[1], width)
    assert read == expected[rows, layer].tolist()
    assert payload[-1] == 0


def test_planes_ranks_experts_where_it_pays_and_reads_long_rows():
    spec, ids = routes(1, 700, 128, 8, 2)
    ids[::50] = np.arange(120, 128)  # a row of rare ranks takes more bits than one fetch brings
    ids[1::50] = np.arange(0, 128, 16)
    rows = np.arange(700)
    codec, words, sizes, starts = encoded("planes", spec, ids, rows)
    out = np.zeros_like(ids)
    codec.decode(words, starts, sizes, rows, np.arange(2), out)
    assert np.array_equal(out, np.sort(ids, axis=-1))
    read = read_planes(words[: sizes[0]], 700, 128, 8, codec.tables["code_lengths"].tolist())
    assert read == out[:, 0].tolist()


@pytest.mark.parametrize("name", CODECS)
def test_only_wanted_rows_and_layers_are_written(name):
    spec, ids = routes(2, 40, 8, 2, 3)
    codec, words, sizes, starts = encoded(name, spec, ids, np.arange(40))
    dest = np.full(40, -1)
    dest[[3, 17, 39]] = [2, 0, 1]
    out = np.full((3, 2, 2), 99, np.uint8)
    codec.decode(words, starts[[2, 0]], sizes[[2, 0]], dest, np.array([1, 0]), out)
    expected = np.sort(ids, axis=-1) if name == "planes" else ids
    assert np.array_equal(out, expected[[17, 39, 3]][:, [0, 2]])


def test_planes_is_the_densest_and_packed_is_exact():
    spec, ids = routes(3, 2000, 128, 8, 2)
    used = {name: encoded(name, spec, ids, np.arange(2000))[2].sum() * 8 / 4000 for name in CODECS}
    assert used["raw"] == pytest.approx(8, abs=0.01)
    assert used["packed"] == pytest.approx(7, abs=0.01)
    assert used["planes"] < 5.05


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 10**9), min_size=1, max_size=256))
def test_code_lengths_are_complete_and_prefix_free(counts):
    lengths = fit_lengths(np.array(counts))
    check_lengths(lengths[None])
    codes = sorted(codes_of(lengths.tolist()))
    assert all(not b.startswith(a) for a, b in pairwise(codes))
    assert max(map(len, codes)) <= MAX_LENGTH


def test_code_lengths_are_optimal_on_a_small_case():
    counts = [50, 20, 15, 10, 5]
    lengths = fit_lengths(np.array(counts) - 1)
    assert sum(n * length for n, length in zip(counts, lengths.tolist(), strict=True)) == 50 + 40 + 45 + 40 + 20


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 2, 3], [0, 1, 1], [1, 2, 12], [12] * 3])
def test_broken_code_books_are_refused(lengths):
    with pytest.raises(TraceContentError, match="complete prefix code"):
        check_lengths(np.array([lengths], np.uint8))


def codec_named(name):
    def change(metadata, tensors):
        metadata["foreroute.codec"] = name

    return change


def test_unknown_codecs_and_missing_tables_are_refused(tmp_path):
    with pytest.raises(TraceContentError, match="expected one of raw, packed, planes"):
        encode_trace(random_trace(0), "zip")
    with pytest.raises(TraceFileError, match="expected one of raw, packed, planes"):
        fr.load(forged(tmp_path / "t", random_trace(0), codec_named("zip")))
    with pytest.raises(TraceContentError, match="code_lengths is missing"):
        CODEC_CLASSES["planes"](spec_of(), {})
    with pytest.raises(TraceContentError, match="expected uint8"):
        CODEC_CLASSES["planes"](spec_of(), {"code_lengths": np.zeros((1, 1), np.uint8)})


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(CODECS), model=st.sampled_from([(8, 2), (128, 8), (257, 2)]), seed=st.integers(0, 2**32 - 1)
)
def test_wrong_words_are_refused_or_give_possible_routes(name, model, seed):
    rng = np.random.default_rng(seed)
    spec, ids = routes(seed, 30, *model, 2)
    codec, words, sizes, starts = encoded(name, spec, ids, np.arange(30))
    for place in rng.integers(0, len(words), 3):
        words[place] = [0, 2**64 - 1, int(words[place]) ^ (1 << int(rng.integers(64)))][rng.integers(3)]
    out = np.zeros_like(ids)
    try:
        codec.decode(words, starts, sizes, np.arange(30), np.arange(2), out)
    except TraceContentError:
        return
    assert out.max() < model[0]
    assert all(len(set(row)) == model[1] for row in out.reshape(-1, model[1]).tolist())

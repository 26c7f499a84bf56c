"""Counts from traces against a loop, on disk, their imbalance, and refusal of counts that cannot be planned."""

import hashlib
import tracemalloc
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.errors import CountsError, SpecMismatchError, TraceContentError
from foreroute.files.container import FileFormat
from foreroute.layout import Packing
from foreroute.plan.counts import (
    check_counts,
    contiguous_imbalance,
    counts_digest,
    load_counts,
    packed_counts,
    save_counts,
)
from foreroute.trace.operations import count_assignments
from tests.traces import mixed_trace, random_trace, uneven_trace


def loop(traces, packing):
    spec = traces[0].spec
    counts = np.zeros((packing.num_micro_steps, spec.num_layers, packing.num_ranks, spec.num_experts), np.int64)
    s = 0
    for trace in traces:
        for first, end in zip(trace.offsets[:-1], trace.offsets[1:], strict=True):
            for row in range(first, end):
                for layer, picks in enumerate(trace.expert_ids_NLK[row].tolist() if trace.valid_N[row] else []):
                    for e in picks:
                        counts[packing.micro_step_S[s], layer, packing.rank_S[s], e] += 1
            s += 1
    return counts


def random_packing(rng, num_sequences, num_micro_steps=3, num_ranks=4):
    return Packing(
        rng.integers(0, num_micro_steps, num_sequences).astype(np.int32),
        rng.integers(0, num_ranks, num_sequences).astype(np.int32),
        num_micro_steps,
        num_ranks,
    )


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), wide=st.booleans())
def test_counts_of_several_traces_match_a_loop(seed, wide):
    experts = 300 if wide else 8
    traces = [random_trace(seed + i, num_experts=experts) for i in range(3)]
    packing = random_packing(np.random.default_rng(seed), sum(map(len, traces)))
    counts = packed_counts(traces, packing)
    assert counts.dtype == np.int32
    np.testing.assert_array_equal(counts, loop(traces, packing))
    micro_step_S = packing.micro_step_S[: len(traces[0])]
    counted = count_assignments(traces[0], micro_step_S)
    alone = Packing(micro_step_S, np.zeros_like(micro_step_S), len(counted), 1)
    np.testing.assert_array_equal(counted, loop(traces[:1], alone)[:, :, 0])
    mixed = mixed_trace(seed)  # with gaps and empty sequences
    packing = random_packing(np.random.default_rng(seed), len(mixed))
    np.testing.assert_array_equal(packed_counts(mixed, packing), loop([mixed], packing))


def test_counts_that_a_small_trace_cannot_fill_are_refused_before_they_are_made():
    trace = random_trace(0, num_experts=4096, num_layers=100)
    zeros = np.zeros(len(trace), np.int32)
    tracemalloc.start()
    with pytest.raises(CountsError, match=r"1,677,721,600 entries.*[\d,]+ assignments"):
        packed_counts(trace, Packing(zeros, zeros, 1, 4096))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_packings_that_do_not_fit_are_refused():
    trace, uneven = random_trace(0), uneven_trace(0)
    zeros = np.zeros(len(trace), np.int32)
    for traces, micro_step_S, rank_S, error, words in (
        (trace, *[np.append(zeros, zeros[:1])] * 2, CountsError, f"with {len(trace)} .*a packing of {len(trace) + 1}"),
        ([], zeros[:0], zeros[:0], CountsError, "got 0 traces"),
        (trace, zeros, zeros + 4, TraceContentError, r"ranks.*4.*numbers.*0.*3"),
        (trace, zeros + 1, zeros, TraceContentError, r"micro.*1.*numbers.*0.*0"),
        ([trace, random_trace(0, num_experts=9)], *[np.tile(zeros, 2)] * 2, SpecMismatchError, r"belongs.*another"),
        (uneven, *[np.zeros(len(uneven), np.int32)] * 2, SpecMismatchError, r"plan.*different sizes"),
    ):
        with pytest.raises(error, match=words):
            packed_counts(traces, Packing(micro_step_S, rank_S, 1, 4))


GOOD = np.full((2, 3, 4, 8), 5)


def changed(where, value, dtype=np.int64):
    counts = GOOD.astype(dtype)
    counts[where] = value
    return counts


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (GOOD[0], r"shape \(3, 4, 8\).*micro-steps"),
        (GOOD[:0], "none of them 0"),
        (GOOD[:, :, :3], "8 experts.*3 ranks"),
        (GOOD.astype(float), "float64.*integers"),
        (changed((1, 2, 3, 4), -7, np.int32), "-7 in micro-step 1, layer 2, source rank 3"),
        (changed((1, 2, 3, 4), 2**64 - 1, np.uint64), "18446744073709551615 in micro-step 1"),
        (changed((1, 2, slice(3), 4), 2**30, np.int32), "micro-step 1, layer 2 holds 3221225617"),
        (np.zeros((1, 1, 1, 2**15 + 1), np.int8), "32769 experts.*32768"),
    ],
)
def test_counts_that_cannot_be_planned_are_refused(counts, words):
    with pytest.raises(CountsError, match=words):
        check_counts(counts)


@pytest.mark.parametrize(
    ("counts", "top_k", "message"),
    [
        (changed((1, 2, 3, 4), 7), 2, "micro-step 1, layer 2, source rank 3 sends 42"),
        (GOOD, 3, "micro-step 0, layer 0, source rank 0.*multiple of top_k = 3"),
        (changed((1, slice(None), 3, slice(4, 6)), (25, 5)), 4, "micro-step 1, layer 0, source rank 3 .*1/4"),
        (GOOD, 9, "top_k is 9"),
    ],
)
def test_counts_that_no_tokens_have_are_refused_when_top_k_is_known(counts, top_k, message):
    check_counts(counts)
    with pytest.raises(CountsError, match=message):
        check_counts(counts, top_k=top_k)


@pytest.mark.parametrize(("largest", "stored"), [(255, "<u1"), (256, "<u2"), (70_000, "<u4")])
def test_the_digest_of_counts_is_that_of_the_page(largest, stored):
    counts_MLGE = np.zeros((2, 1, 3, 4), np.int64)
    counts_MLGE[1, 0, 2, 3] = largest
    sums = b"".join(crc32(counts_LGE.astype(stored).tobytes()).to_bytes(4, "little") for counts_LGE in counts_MLGE)
    content = f"2x1x3x4:{np.dtype(stored).itemsize}".encode() + sums
    expected = hashlib.blake2b(content, digest_size=16).hexdigest()
    assert counts_digest(counts_MLGE) == expected
    assert counts_digest(np.asfortranarray(counts_MLGE.astype(np.uint32))) == expected


COUNTS = np.arange(2 * 3 * 4 * 8).reshape(2, 3, 4, 8)


@pytest.mark.parametrize(("dtype", "order"), [("<i4", "F"), (">i8", "C"), ("u1", "F"), ("<u2", "C")])
def test_counts_survive_the_disk(tmp_path, dtype, order):
    counts = np.array(COUNTS, dtype, order=order)
    found = load_counts(save_counts(counts, tmp_path / "c"))
    assert found.dtype == np.int32
    assert np.array_equal(found, counts)


def test_forged_counts_are_refused(tmp_path):
    forger = FileFormat("counts", 1, CountsError, (), None, "")
    forger.write(tmp_path / "c", {}, {"counts_MLGE": (COUNTS - 1).astype(np.int32)}, overwrite=False)
    with pytest.raises(CountsError, match=r"c: .*entry -1 in micro-step 0"):
        load_counts(tmp_path / "c")


def test_the_imbalance_of_contiguous_homes_by_hand():
    counts = np.array([[[4, 0, 2, 2], [1, 1, 1, 1]]])  # one micro-step, two layers, four experts
    assert contiguous_imbalance(counts, 2) == pytest.approx((1.0 + 1.0) / 2)
    # an empty cell is no barrier
    assert contiguous_imbalance(np.concatenate([counts, 0 * counts]), 4) == pytest.approx((2.0 + 1.0) / 2)
    assert contiguous_imbalance(0 * counts, 4) == 1

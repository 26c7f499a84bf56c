"""Counts of traces against a loop, on disk, and refused; rows of every rank against a dispatch of picks one by one."""

import hashlib
import tracemalloc
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute import concatenate
from foreroute.errors import CountsError, PlanError, SpecMismatchError, TopologyError, TraceContentError
from foreroute.files.container import FileFormat
from foreroute.layout import Packing, pack_sequences
from foreroute.plan import Topology, known_rows
from foreroute.plan.counts import check_counts, counts_digest, load_counts, packed_counts, save_counts, tokens_digest
from foreroute.testing.routes import synthetic_trace
from foreroute.trace.operations import count_assignments
from tests.plan.random_plans import LINKS, random_counts, random_plan
from tests.traces import mixed_trace, random_trace, spec_of, uneven_trace


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
        (GOOD[0], r"shape \(3, 4, 8\).*\[micro-steps, layers.*experts\]"),
        (GOOD[:0], r"none.*them 0"),
        (GOOD[:, :, :3], r"8 experts.*3 ranks.*\[micro-steps"),
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
        (changed((1, 2, 3, 4), 7), 2, "layer 2 .*42 .*rank 3 .*step 1: layer 0"),
        (GOOD, 3, "layer 0 .*rank 0 .*step 0: .*top_k 3"),
        (changed((1, slice(None), 3, slice(4, 6)), (25, 5)), 4, "layer 0 .*rank 3 .*step 1: .*1/4"),
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


RANKS, EXPERTS = 4, 8
TOPOLOGY = Topology(RANKS, 2, 2, LINKS)
BLOCKS_LE = TOPOLOGY.contiguous_home_LE(3, EXPERTS)


def sequences(seed):
    return concatenate([random_trace(seed + i) for i in range(4)])


def executed(trace, packing, plan, align=1, native=None):
    """Send every pick of every token to the host that it goes to, and count what arrives.

    The picks of an expert on a source rank go to its home first, then to its replicas in ascending order of their rank.
    Tokens without a route pick `native` experts, at their homes.
    """
    rows = np.zeros((packing.num_micro_steps, trace.spec.num_layers, RANKS), int)
    micro_step_N, rank_N = (np.repeat(of_S, trace.lengths) for of_S in (packing.micro_step_S, packing.rank_S))
    for m, layer in np.ndindex(rows.shape[:2]):
        cell, load_GE = plan.cell(m, layer), np.zeros((RANKS, EXPERTS), int)
        for g in range(RANKS):
            mine = (micro_step_N == m) & (rank_N == g)
            known = np.bincount(trace.expert_ids_NLK[mine & trace.valid_N, layer].ravel(), minlength=EXPERTS)
            for e, count in enumerate(known):
                replicas = sorted(np.flatnonzero(cell.expert_R == e), key=lambda r: cell.rank_R[r])
                hosts = np.repeat(cell.rank_R[replicas], cell.tokens_RG[replicas, g])
                at_home = np.repeat(cell.home_E[e], count - len(hosts))
                load_GE[:, e] += np.bincount(np.concatenate([at_home, hosts]), minlength=RANKS)
            if native is not None:
                ids = native[mine & ~trace.valid_N, layer].ravel()
                np.add.at(load_GE, (cell.home_E[ids], ids), 1)
        rows[m, layer] = (-(-load_GE // align) * align).sum(axis=1)
    return rows


def of_replicas(cell, align):
    """Rows that replicas serve on each rank, replicas there, and replicas elsewhere of experts that live there."""
    found = np.zeros((3, RANKS), int)
    for expert, rank, tokens_G in zip(cell.expert_R, cell.rank_R, cell.tokens_RG, strict=True):
        found[0, rank] += -(-tokens_G.sum() // align) * align
        found[1, rank] += 1
        found[2, cell.home_E[expert]] += 1
    return found


def planned_rows(trace, packing, seed, topology=TOPOLOGY, **options):
    plan = random_plan(packed_counts(trace, packing), topology, seed=seed, **options)
    return replace(plan, packing=packing, tokens_digest=tokens_digest(trace))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31 - 1), align=st.sampled_from([1, 16]), slots=st.sampled_from([0, 2]))
def test_rows_are_those_of_a_dispatch_of_every_pick(seed, align, slots):
    trace, rng = sequences(seed), np.random.default_rng(seed)
    packing = Packing(*rng.integers(0, 3, (2, len(trace))).astype(np.int32), 3, RANKS)
    plan = planned_rows(trace, packing, seed, moves=2, topology=replace(TOPOLOGY, redundant_slots=slots))
    known = known_rows([trace], plan, align=align) if slots else None
    if known is None:
        known = known_rows(trace, plan.home_LE, packing=packing, align=align)
    elif align == 1:
        assert (known.rows_MLG.max(axis=2) == plan.max_load_ML).all()
    np.testing.assert_array_equal(known.rows_MLG, executed(trace, packing, plan, align))
    np.testing.assert_array_equal(
        [known.replica_rows_MLG, known.replicas_MLG, known.returned_MLG],
        np.moveaxis([[of_replicas(plan.cell(m, n), align) for n in range(3)] for m in range(3)], 2, 0),
    )
    # tokens without a route pick at random, or all of them the experts of one rank: there is room
    picks = [np.argsort(rng.random((len(trace.valid_N), 3, EXPERTS)), axis=-1)[..., :2]]
    for g in range(RANKS):
        of_rank_L2 = np.argsort(plan.home_LE != g, axis=1, kind="stable")[:, :2]
        picks.append(np.broadcast_to(of_rank_L2, picks[0].shape))
    executions = np.stack([executed(trace, packing, plan, align, native) for native in picks])
    assert (executions <= known.reserved_MLG).all()
    if align == 1:  # and not a row too much
        np.testing.assert_array_equal(executions.max(axis=0), known.reserved_MLG)
    np.testing.assert_array_equal(known.most_LG, known.reserved_MLG.max(axis=0))


def test_policies_by_hand():
    rows = np.zeros((2, 1, 2, 2), int)  # each source rank has a token for either expert in the first micro-step
    rows[0, 0], rows[1, 0] = [[3, 1], [3, 1]], [[2, 0], [0, 2]]
    before = known_rows(np.full((1, 1, 2, 2), 2), np.array([[0, 1]]))
    known = known_rows(rows, np.array([[0, 1]]), top_k=1)
    assert known.torchtitan_arguments() == {"non_blocking_capacity_factor": 6 / 8}
    found = {one.name: one for one in known.policies(before)}
    mean, worst, last = found["mean x 1.10"], found["worst case"], found["the step before's most, of a layer"]
    # rows are 6, 2 and 2, 2; 1.10 times the means are 4 and 2, cut to whole rows
    assert (mean.largest, mean.overflowing_cells) == (4, 1 / 2)
    assert (mean.dropped, mean.unused) == (2 / 12, 2 / 12)
    assert (worst.largest, worst.overflowing_cells, worst.dropped, worst.unused) == (8, 0, 0, (2 + 6 + 2 + 2) / 12)
    assert (last.largest, last.overflowing_cells, last.dropped, last.unused) == (4, 1 / 2, 2 / 12, (2 + 2 + 2) / 12)
    unused = {"known, of a layer": 12 / 12, "known, of a rank and layer": 4 / 12, "known, of each cell": 0}
    for name, expected in unused.items():
        assert (found[name].overflowing_cells, found[name].dropped) == (0, 0)
        assert found[name].unused == expected


def test_buffers_that_overflow_are_refused_before_the_step():
    trace = sequences(1)
    known = known_rows(trace, BLOCKS_LE, packing=pack_sequences(trace.lengths, RANKS, 6))
    known.require_room(known.most_LG)
    known.require_room(int(known.most_LG.max()))
    short = known.reserved_MLG.copy()
    short[1, 2, 3] -= 1
    with pytest.raises(PlanError, match=r"micro-step 1, layer 2, rank 3.*known route"):
        known.require_room(short)
    with pytest.raises(CountsError, match=r"buffers.*integers"):
        known.require_room(known.most_LG[:, :2])


SENT = random_counts(3, (2, 3, RANKS, EXPERTS)).astype(np.int32)
TRACE = synthetic_trace(spec_of(), [5, 6, 7], seed=0)
PACKING = pack_sequences(TRACE.lengths, RANKS, 8)
PLAN = random_plan(SENT, TOPOLOGY)


@pytest.mark.parametrize(
    ("error", "words", "step", "placement", "options"),
    [
        (CountsError, r"plan is.*\[2, 3, 4, 8\]", SENT[:1], PLAN, {}),
        (CountsError, "digest", SENT + 1, PLAN, {}),
        (CountsError, "top_k", SENT, BLOCKS_LE, {"native_MG": np.ones((2, RANKS), int)}),
        (CountsError, "native_MG", TRACE, BLOCKS_LE, {"packing": PACKING, "native_MG": [[1]]}),
        (CountsError, "align", SENT, BLOCKS_LE, {"align": 0}),
        (TopologyError, "homes", SENT, BLOCKS_LE[:1], {}),
        (TopologyError, "home to", SENT, BLOCKS_LE * 0, {}),
        (PlanError, "packing", TRACE, BLOCKS_LE, {}),
        (PlanError, "packing", TRACE, PLAN, {"packing": PACKING}),
        (PlanError, "digest", TRACE.select([0, 1]), planned_rows(TRACE, PACKING, 0), {}),
    ],
)
def test_what_does_not_fit_is_refused(error, words, step, placement, options):
    with pytest.raises(error, match=words):
        known_rows(step, placement, **options)


def test_torchtitans_factor_is_of_tokens_and_of_homes():
    with pytest.raises(CountsError, match="top_k"):
        known_rows(SENT, BLOCKS_LE).torchtitan_arguments()
    with pytest.raises(PlanError, match="replicas"):
        known_rows(TRACE, planned_rows(TRACE, PACKING, 0)).torchtitan_arguments()


def test_the_step_before_must_be_of_the_same_model():
    known = known_rows(SENT, BLOCKS_LE)
    with pytest.raises(CountsError, match=r"step before.*same"):
        known.policies(known_rows(SENT[:, :1], BLOCKS_LE[:1]))

"""Rows of every rank against a dispatch of picks one by one, buffers that overflow, and refused input."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute import concatenate
from foreroute.errors import CountsError, PlanError, TopologyError
from foreroute.layout import Packing, pack_sequences
from foreroute.plan import Topology, known_rows
from foreroute.plan.counts import packed_counts, tokens_digest
from foreroute.testing.routes import synthetic_trace
from tests.plan.random_plans import LINKS, random_counts, random_plan
from tests.traces import random_trace, spec_of

RANKS, EXPERTS = 4, 8
TOPOLOGY = Topology(RANKS, 2, 2, LINKS)
BLOCKS_LE = np.tile(TOPOLOGY.contiguous_home_E(EXPERTS), (3, 1))


def sequences(seed):
    return concatenate([random_trace(seed + i) for i in range(4)])


def executed(trace, packing, plan, align=1, native=None):
    """Send every pick of every token to the host that it goes to, and count what arrives.

    The picks of an expert on a source rank go to its home first, then to its replicas in ascending order of their rank.
    Tokens without a route pick `native` experts, at their homes.
    """
    rows = np.zeros((packing.num_micro_steps, trace.spec.num_layers, RANKS), int)
    for m, layer in np.ndindex(rows.shape[:2]):
        cell, load_GE = plan.cell(m, layer), np.zeros((RANKS, EXPERTS), int)
        for g in range(RANKS):
            mine = np.isin(np.repeat(np.arange(len(trace)), trace.lengths), packing.sequences(m, g))
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


def planned(trace, packing, seed, topology=TOPOLOGY, **options):
    plan = random_plan(packed_counts(trace, packing), topology, seed=seed, **options)
    return replace(plan, packing=packing, tokens_digest=tokens_digest(trace))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31 - 1), align=st.sampled_from([1, 16]), slots=st.sampled_from([0, 2]))
def test_rows_are_those_of_a_dispatch_of_every_pick(seed, align, slots):
    trace, rng = sequences(seed), np.random.default_rng(seed)
    packing = Packing(*rng.integers(0, 3, (2, len(trace))).astype(np.int32), 3, RANKS)
    plan = planned(trace, packing, seed, moves=2, topology=replace(TOPOLOGY, redundant_slots=slots))
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
    assert (mean.largest, mean.overflowing, mean.overflowing_cells) == (4, 1 / 4, 1 / 2)
    assert (mean.dropped, mean.unused) == (2 / 12, 2 / 12)
    assert (worst.largest, worst.overflowing, worst.dropped, worst.unused) == (8, 0, 0, (2 + 6 + 2 + 2) / 12)
    assert (last.largest, last.overflowing, last.dropped, last.unused) == (4, 1 / 4, 2 / 12, (2 + 2 + 2) / 12)
    unused = {"known, of a layer": 12 / 12, "known, of a rank and layer": 4 / 12, "known, of each cell": 0}
    for name, expected in unused.items():
        assert (found[name].overflowing, found[name].dropped) == (0, 0)
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


COUNTS = random_counts(3, (2, 3, RANKS, EXPERTS)).astype(np.int32)
TRACE = synthetic_trace(spec_of(), [5, 6, 7], seed=0)
PACKING = pack_sequences(TRACE.lengths, RANKS, 8)
PLAN = random_plan(COUNTS, TOPOLOGY)


@pytest.mark.parametrize(
    ("error", "words", "step", "placement", "options"),
    [
        (CountsError, "the plan is for", COUNTS[:1], PLAN, {}),
        (CountsError, "digest", COUNTS + 1, PLAN, {}),
        (CountsError, "top_k", COUNTS, BLOCKS_LE, {"native_MG": np.ones((2, RANKS), int)}),
        (CountsError, "native_MG", TRACE, BLOCKS_LE, {"packing": PACKING, "native_MG": [[1]]}),
        (CountsError, "align", COUNTS, BLOCKS_LE, {"align": 0}),
        (TopologyError, "homes", COUNTS, BLOCKS_LE[:1], {}),
        (TopologyError, "home to", COUNTS, BLOCKS_LE * 0, {}),
        (PlanError, "packing", TRACE, BLOCKS_LE, {}),
        (PlanError, "packing", TRACE, PLAN, {"packing": PACKING}),
        (PlanError, "digest", TRACE.select([0, 1]), planned(TRACE, PACKING, 0), {}),
    ],
)
def test_what_does_not_fit_is_refused(error, words, step, placement, options):
    with pytest.raises(error, match=words):
        known_rows(step, placement, **options)


def test_torchtitans_factor_is_of_tokens_and_of_homes():
    with pytest.raises(CountsError, match="top_k"):
        known_rows(COUNTS, BLOCKS_LE).torchtitan_arguments()
    with pytest.raises(PlanError, match="replicas"):
        known_rows(TRACE, planned(TRACE, PACKING, 0)).torchtitan_arguments()


def test_the_step_before_must_be_of_the_same_model():
    known = known_rows(COUNTS, BLOCKS_LE)
    with pytest.raises(CountsError, match=r"step before.*same"):
        known.policies(known_rows(COUNTS[:, :1], BLOCKS_LE[:1]))

"""Rows that ranks share are counted as one process would, and what is planted into them is named on every rank."""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from foreroute.mismatch import LooksLike, Sentinel
from foreroute.mismatch.sentinel import WARM_UP
from foreroute.replay import RootRows
from foreroute.trace import concatenate
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.grid_checks import carrying
from tests.adapters.megatron.micro_batches import Batch, layout_of, make_batches, split
from tests.adapters.megatron.model_chunks import EXPERTS, VOCABULARY, attached
from tests.adapters.megatron.training_step import forward_step, step
from tests.replay.root_oracle import root_counts

LENGTHS = ((96, 80), (90, 96))
FLIPPED = 0.03
"""Share of (row, layer) that a healthy rollout has of no router."""
STALE = slice(20, 80)


@on_ranks(2)
def test_rows_of_sequence_parallel_ranks():
    check_rows(Cell(tp=2, layers=2, packed=True))


@on_ranks(2)
def test_rows_of_context_parallel_ranks():
    check_rows(Cell(cp=2, layers=2))


@on_ranks(2)
def test_rows_of_stages_and_their_virtual_chunks():
    check_rows(Cell(pp=2, vpp=2))


@pytest.mark.slow
@on_ranks(2)
def test_so_they_are_in_other_splits():
    for cell in (
        Cell(tp=2, layers=2),
        # ranks of tensor parallelism that have the same rows
        Cell(tp=2, layers=2, settings=(("sequence_parallel", False),)),
        Cell(cp=2, layers=2, packed=True),
        Cell(pp=2),
        # the first of its virtual stages has no router
        Cell(pp=2, vpp=2, settings=(("moe_layer_freq", [0, 1, 1, 1]),)),
    ):
        check_rows(cell)


@pytest.mark.slow
@on_ranks(4)
def test_so_they_are_where_ranks_share_rows_in_two_ways_and_layers():
    check_rows(Cell(cp=2, tp=2, layers=2, packed=True))
    check_rows(Cell(pp=2, cp=2))


def check_rows(cell):
    """Against the routes of the whole batch; then a run, in which what is planted alone is named."""
    chunks, routed = attached(cell)
    for chunk in chunks:
        chunk.eval()
    batches = make_batches(cell)
    _, healthy = rollout(chunks, routed, batches, np.random.default_rng(0))
    before = concatenate(healthy)
    for traces in (healthy, planted(before, before, stale_rows), planted(before, before, shift)):
        traces = traces if isinstance(traces, list) else split(traces, batches)
        found, expected = counted(chunks, routed, batches, traces)
        for name in ("roots_N", "before_N", "after_N", "repeats_N", "roots_L", "lengths_S"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert found.before_N.any()
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found.roots_N.tolist())
    assert everywhere == [everywhere[0]] * len(everywhere)

    rng, sentinel, before = np.random.default_rng(1), Sentinel(routed.spec), None
    for _ in range(WARM_UP + 1):
        batches, traces = rollout(chunks, routed, long_batches(cell, rng), rng)
        before = concatenate(traces)
        assert not sentinel.judge(counted(chunks, routed, batches, traces)[0])
    batches, traces = rollout(chunks, routed, long_batches(cell, rng), rng)
    whole, names = concatenate(traces), {}
    for fault in (nothing, stale_rows, shift, frozen, stale_layer):
        rows, expected = counted(chunks, routed, batches, split(planted(whole, before, fault), batches))
        found, as_one = (copy.deepcopy(sentinel).judge(each) for each in (rows, expected))
        assert found == as_one
        names[fault] = {(each.looks_like, each.sequence, each.layer) for each in found}
    assert names[nothing] == set()
    assert names[stale_rows] == {(LooksLike.STALE_ROWS, 1, None)}
    assert names[shift] == {(LooksLike.SHIFT, s, None) for s in range(len(whole))}
    assert names[frozen] == {(LooksLike.FROZEN, 1, None)}
    assert names[stale_layer] == {(LooksLike.STALE_LAYER, None, 1)}


def long_batches(cell, rng):
    align = 2 * cell.cp * cell.tp
    lengths = [LENGTHS[0]] * 4 if cell.vpp > 1 else LENGTHS
    return [
        Batch(each, tuple(torch.from_numpy(rng.integers(0, VOCABULARY, n)) for n in each), cell.packed, align, width=96)
        for each in lengths
    ]


def rollout(chunks, routed, batches, rng):
    """The batches, and what an engine would have routed them by: the model's own routes but for some."""
    with routed.record() as recording:
        step(chunks, batches, forward_only=True)
    traces = split(recording.trace(), batches)
    for number, trace in enumerate(traces):
        ids, valid = trace.expert_ids_NLK.copy(), trace.valid_N.copy()
        flipped = rng.random(ids.shape[:2]) < FLIPPED
        ids[flipped] = (ids[flipped] + 3) % EXPERTS
        valid[trace.offsets[1:] - 1] = False
        traces[number] = dataclasses.replace(trace, expert_ids_NLK=ids, valid_N=valid)
    return batches, traces


def counted(chunks, routed, batches, traces):
    """What ranks count of a replay, and what one process would of natives that were put together."""
    lengths = np.concatenate([trace.lengths for trace in traces])
    rows = RootRows(routed)
    given = carrying(batches, traces)
    given[0] = dataclasses.replace(given[0], routes=routed.shard(traces[0], layout_of(given[0])))
    with routed.listening(rows), routed.record(native=True) as recording:
        step(chunks, given, routed.replaying(forward_step), forward_only=True)
    natives = split(recording.trace(), batches)
    expected = root_counts(np.concatenate([each.expert_ids_NLK for each in natives]), concatenate(traces))
    return rows.read(lengths), expected


def planted(whole, before, fault):
    ids = whole.expert_ids_NLK.copy()
    fault(ids, whole.offsets, before.expert_ids_NLK)
    return dataclasses.replace(whole, expert_ids_NLK=ids)


def nothing(ids, offsets, before):
    pass


def stale_rows(ids, offsets, before):
    first, stop = offsets[1:3]
    ids[first:stop][STALE] = before[:first][: len(ids[first:stop][STALE])]


def shift(ids, offsets, before):
    for first, stop in itertools.pairwise(offsets):
        ids[first + 1 : stop] = ids[first : stop - 1].copy()


def frozen(ids, offsets, before):
    ids[offsets[1] + 20 : offsets[2]] = ids[offsets[1] + 20]


def stale_layer(ids, offsets, before):
    ids[:, 1] = before[:, 1]

"""What no rank can do alone: put recordings and counts of rows together, and refuse what one stage cannot replay."""

import dataclasses
import itertools

import numpy as np
import torch.distributed as dist

from foreroute.adapters import megatron
from foreroute.ep.transfer.peers import gather_objects
from foreroute.errors import AttachError
from foreroute.replay import RootRows
from foreroute.trace import concatenate, digest
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.grid_checks import placed
from tests.adapters.megatron.micro_batches import make_batches, split
from tests.adapters.megatron.model_chunks import EXPERTS, attached, build, initialize
from tests.adapters.megatron.training_step import forward_step, step
from tests.replay.root_oracle import root_counts
from tests.replay.session_subject import refuses

FLIPPED = 0.03
"""Share of (row, layer) that a healthy rollout has of no router."""


@on_ranks(2)
def test_margins_and_rollouts_are_put_together_on_every_rank():
    check_margins_and_rollouts(Cell(pp=2, vpp=2, recompute="block"))
    check_margins_and_rollouts(Cell(cp=2, packed=True))


def check_margins_and_rollouts(cell):
    chunks, routed = attached(cell)
    batches = make_batches(cell)
    with routed.record(margins=True) as recording:
        step(chunks, batches)
    trace, margins_NL = recording.trace(), recording.margins_NL()
    assert margins_NL.shape == trace.expert_ids_NLK.shape[:2]
    assert (margins_NL > 0).all()
    tokens = [each for batch in batches for each in batch.tokens]
    rollout = recording.rollout(tokens)
    assert [rollout.tokens(s).tolist() for s in range(len(rollout))] == [each.tolist() for each in tokens]
    whole = trace.truncated(rollout.lengths)
    routed_N = rollout.valid_N
    assert np.flatnonzero(~routed_N).tolist() == (rollout.offsets[1:] - 1).tolist()
    assert np.array_equal(rollout.expert_ids_NLK[routed_N], whole.expert_ids_NLK[routed_N])
    require_alike(digest(trace), digest(rollout), margins_NL.tobytes())


def require_alike(*mine):
    """Ranks of one model put the same things together."""
    assert len(set(gather_objects(mine, dist.group.WORLD, "comparing"))) == 1


@on_ranks(2)
def test_the_refusal_of_one_stage_reaches_all():
    initialize(Cell(pp=2))
    chunks = build(Cell(pp=2))
    if dist.get_rank() == 1:
        router = next(module for module in chunks[0].decoder.modules() if hasattr(module, "routing_type"))
        router.routing_type = "sinkhorn"
    refuses(AttachError, r"'sinkhorn'.*top-k", lambda: megatron.attach(chunks))


@on_ranks(2)
def test_rows_that_ranks_share_are_counted_as_one_process_would():
    check_rows(Cell(tp=2, layers=2, packed=True))
    check_rows(Cell(cp=2, layers=2))


def check_rows(cell):
    """Of a rollout that is healthy, and with rows of another in it, and with every row one late."""
    chunks, routed = attached(cell)
    chunks[0].eval()
    batches = make_batches(cell)
    whole = rollout(chunks, routed, batches)
    stale, late = whole.expert_ids_NLK.copy(), whole.expert_ids_NLK.copy()
    first, stop = whole.offsets[1:3]
    kept = min(first, stop - first)
    stale[first : first + kept] = whole.expert_ids_NLK[:kept]
    for begin, end in itertools.pairwise(whole.offsets):
        late[begin + 1 : end] = whole.expert_ids_NLK[begin : end - 1]
    for ids_NLK in (whole.expert_ids_NLK, stale, late):
        trace = dataclasses.replace(whole, expert_ids_NLK=ids_NLK)
        found, expected = counted(chunks, routed, batches, trace)
        for name in ("roots_N", "before_N", "after_N", "repeats_N", "roots_L", "lengths_S"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert found.before_N.any()
    require_alike(found.roots_N.tobytes())


def rollout(chunks, routed, batches):
    """What an engine would have routed the batches by: the model's own routes but for some."""
    with routed.record() as recording:
        step(chunks, batches, forward_only=True)
    trace, rng = concatenate(split(recording.trace(), batches)), np.random.default_rng(0)
    ids, valid = trace.expert_ids_NLK.copy(), trace.valid_N.copy()
    flipped = rng.random(ids.shape[:2]) < FLIPPED
    ids[flipped] = (ids[flipped] + 3) % EXPERTS
    valid[trace.offsets[1:] - 1] = False
    return dataclasses.replace(trace, expert_ids_NLK=ids, valid_N=valid)


def counted(chunks, routed, batches, trace):
    """What ranks count of a replay, and what one process would of natives that were put together."""
    rows, given = RootRows(routed), placed(routed, batches, split(trace, batches))
    with routed.listening(rows), routed.record(native=True) as recording:
        step(chunks, given, routed.replaying(forward_step), forward_only=True)
    natives = split(recording.trace(), batches)
    expected = root_counts(np.concatenate([each.expert_ids_NLK for each in natives]), trace)
    return rows.read(trace.lengths), expected

"""What no rank can do alone: put a recording together, and refuse a model of which one stage cannot be replayed."""

import contextlib
import pickle
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from foreroute.adapters import megatron
from foreroute.errors import AttachError
from foreroute.trace import digest
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.micro_batches import PAD_ROW, expected_rows, make_batches, split
from tests.adapters.megatron.model_chunks import attached, build, initialize
from tests.adapters.megatron.one_rank import refuses
from tests.adapters.megatron.training_step import forward_step, native_routes, step
from tests.replay.session_subject import same

STAGES, VIRTUAL, CONTEXT, PACKED, TENSOR, EXPERTS, UNROUTED = (
    Cell(pp=2),
    Cell(pp=2, vpp=2, recompute="block"),
    Cell(cp=2, recompute="uniform"),
    Cell(cp=2, packed=True),
    Cell(tp=2, packed=True, recompute="selective"),
    Cell(ep=2),
    # the first of its virtual stages has no router
    Cell(pp=2, vpp=2, recompute="uniform", settings=(("moe_layer_freq", [0, 1, 1, 1]),)),
)


@on_ranks(2)
def test_a_recording_is_put_together_on_every_rank():
    for cell in (STAGES, UNROUTED):
        check_recording(cell)


@pytest.mark.slow
@on_ranks(2)
def test_so_it_is_in_other_splits():
    for cell in (VIRTUAL, CONTEXT, PACKED, TENSOR, EXPERTS):
        check_recording(cell)


@on_ranks(2)
def test_margins_and_rollouts_are_put_together_on_every_rank():
    check_margins_and_rollouts(VIRTUAL)


@pytest.mark.slow
@on_ranks(2)
def test_so_they_are_in_other_splits():
    for cell in (CONTEXT, TENSOR):
        check_margins_and_rollouts(cell)


@pytest.mark.exhaustive
@on_ranks(2)
def test_so_they_are_in_all_splits():
    for cell in (STAGES, PACKED, EXPERTS, UNROUTED):
        check_margins_and_rollouts(cell)


@contextlib.contextmanager
def arrays_stay_out_of_objects():
    """What goes from rank to rank as objects is pickled, and on NCCL copied to the GPU for it."""
    gather = dist.all_gather_object

    def watched(values, value, group=None):
        assert b"numpy" not in pickle.dumps(value), "rows are gathered as tensors"
        gather(values, value, group=group)

    with mock.patch.object(dist, "all_gather_object", watched):
        yield


def check_recording(cell):
    """What is recorded around a training step changes no bit, is what dispatchers were given, and is replayed."""
    chunks, routed = attached(cell)
    batches = make_batches(cell)
    losses, grads, picks, _ = native_routes(chunks, batches)
    with routed.record(weight_version=3) as recording:
        recorded_losses, recorded_grads = step(chunks, batches)
    assert recorded_losses == losses
    assert same(recorded_grads, grads)
    with arrays_stay_out_of_objects():
        trace = recording.trace()
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, digest(trace))
    assert len(set(everywhere)) == 1 or cell.ep > 1, "ranks of one model recorded different traces"
    traces = split(trace, batches)
    for layer, of_layer in picks.items():
        column = [named.index for named in trace.spec.layers].index(layer)
        for batch, one, ids_RK in zip(batches, traces, of_layer, strict=True):
            rows_R = expected_rows(batch)
            real = rows_R != PAD_ROW
            assert np.array_equal(np.sort(one.expert_ids_NLK[rows_R[real], column]), np.sort(ids_RK[real])), layer
    for batch, one in zip(batches, traces, strict=True):
        assert [one.tokens(s).tolist() for s in range(len(one))] == [t.tolist() for t in batch.tokens]
        assert one.versions == (3,)
        object.__setattr__(batch, "routes", one)
    replayed = step(chunks, batches, routed.replaying(forward_step, padding="native"))
    assert replayed[0] == losses
    assert same(replayed[1], grads)


def check_margins_and_rollouts(cell):
    """Every rank puts all of them together alike."""
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
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (digest(trace), digest(rollout), margins_NL.tobytes()))
    assert len(set(everywhere)) == 1 or cell.ep > 1, "ranks of one model put different things together"


@on_ranks(2)
def test_the_refusal_of_one_stage_reaches_all():
    """Its reason reaches every rank; none waits for it for ever."""
    initialize(Cell(pp=2))
    chunks = build(Cell(pp=2))
    if dist.get_rank() == 1:
        router = next(module for module in chunks[0].decoder.modules() if hasattr(module, "routing_type"))
        router.routing_type = "sinkhorn"
    refuses(AttachError, "'sinkhorn' does not select by top-k", lambda: megatron.attach(chunks))

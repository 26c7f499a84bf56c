"""What no rank can do alone: put a recording together, and refuse a model of which one stage cannot be replayed."""

import numpy as np
import torch.distributed as dist

from foreroute.adapters import megatron
from foreroute.ep.transfer.peers import gather_objects
from foreroute.errors import AttachError
from foreroute.trace import digest
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.micro_batches import make_batches
from tests.adapters.megatron.model_chunks import attached, build, initialize
from tests.adapters.megatron.training_step import step
from tests.replay.session_subject import refuses


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
    mine = digest(trace), digest(rollout), margins_NL.tobytes()
    assert len(set(gather_objects(mine, dist.group.WORLD, "comparing"))) == 1, (
        "ranks of one model put different things together"
    )


@on_ranks(2)
def test_the_refusal_of_one_stage_reaches_all():
    initialize(Cell(pp=2))
    chunks = build(Cell(pp=2))
    if dist.get_rank() == 1:
        router = next(module for module in chunks[0].decoder.modules() if hasattr(module, "routing_type"))
        router.routing_type = "sinkhorn"
    refuses(AttachError, "'sinkhorn' does not select by top-k", lambda: megatron.attach(chunks))

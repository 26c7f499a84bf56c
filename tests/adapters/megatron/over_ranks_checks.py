"""Recording and attaching where no rank has the whole: every rank gets the whole trace, or the same refusal."""

import numpy as np
import torch.distributed as dist

from foreroute.adapters import megatron
from foreroute.errors import AttachError
from foreroute.trace import digest
from tests.adapters.megatron.micro_batches import PAD_ROW, expected_rows, make_batches
from tests.adapters.megatron.model_chunks import build, initialize
from tests.adapters.megatron.one_rank import refuses
from tests.adapters.megatron.training_step import forward_step, native_routes, same, step


def check_recording(cell):
    """What is recorded around a training step changes no bit, is what dispatchers were given, and is replayed."""
    initialize(cell)
    chunks, batches = build(cell), make_batches(cell)
    routed = megatron.attach(chunks)
    losses, grads, picks, _ = native_routes(chunks, batches)
    with routed.record(weight_version=3) as recording:
        recorded_losses, recorded_grads = step(chunks, batches)
    assert recorded_losses == losses
    assert same(recorded_grads, grads)
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
    return trace.num_rows


def check_a_stage_that_cannot_be_attached(cell):
    """Its reason reaches every rank; none waits for it for ever."""
    initialize(cell)
    chunks = build(cell)
    if dist.get_rank() == 1:
        router = next(module for module in chunks[0].decoder.modules() if hasattr(module, "routing_type"))
        router.routing_type = "sinkhorn"
    refuses(AttachError, "'sinkhorn' does not select by top-k", lambda: megatron.attach(chunks))


def split(trace, batches):
    """The trace of each micro-batch; of a padded one, rows of padding were recorded as well."""
    ends = np.cumsum([len(batch.lengths) for batch in batches])
    parts = [trace.select(np.arange(end - len(batch.lengths), end)) for end, batch in zip(ends, batches, strict=True)]
    return [part.truncated(np.array(batch.lengths)) for part, batch in zip(parts, batches, strict=True)]

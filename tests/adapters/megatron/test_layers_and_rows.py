"""Which rows a model's batches have however it is called, and traces that are recorded."""

from functools import partial

import numpy as np
import torch
from megatron.core.inference.contexts import StaticInferenceContext

from foreroute.errors import BatchMismatchError
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import SHAPES, Cell
from tests.adapters.megatron.model_chunks import attached
from tests.adapters.megatron.one_rank import MegatronSubject, model
from tests.replay.session_subject import (
    batch_of,
    foreign,
    recorded,
    refuses,
    require_followed,
    step,
)

WIDTH = 12
BATCH = batch_of(WIDTH, WIDTH)


def of_cell(cell):
    [built], routed = attached(cell)
    on = MegatronSubject(built.train())
    on.routed = routed
    return on, foreign(routed.spec, BATCH)


@on_ranks(2)
def test_routers_beside_the_decoder_are_named_on_every_stage():
    _, routed = attached(SHAPES["multi-token prediction on the last stage"])
    [name] = routed.native_routers
    assert name.startswith("mtp.layers.0.")
    assert len(routed.spec.layers) == SHAPES["multi-token prediction on the last stage"].layers


@on_ranks(1)
def test_tokens_are_not_taken_for_padding():
    """The trace of shorter sequences has the tokens of the longer ones, as far as it goes."""
    on, short = MegatronSubject(model()), batch_of(WIDTH - 2, WIDTH)
    trace, mask = foreign(on.routed.spec, short), ~short.real_BT
    for batch, given, said in (
        (short, None, None),
        (BATCH, mask, None),
        (BATCH, None, "is padding to the trace and a token to the batch, .* pass padding_mask"),
        (short, torch.zeros_like(mask), "by its padding_mask; 2 rows"),
        (short, mask.flip(0) | mask, "is a token to the trace"),
    ):
        with on.routed.replay(trace), torch.no_grad():
            run = partial(on.run, batch, padding_mask=given)
            refuses(BatchMismatchError, said, run) if said else run()
            on.run(short)


@on_ranks(1)
def test_static_inference_is_captured_in_the_same_type():
    """Prefill and steps over a cache give the routes of one forward over the whole, and replay in training."""
    on, _ = of_cell(Cell(layers=2, as_shipped=True))
    built, context = on.model.eval(), StaticInferenceContext(2, WIDTH)
    cached = {"inference_context": context, "runtime_gather_output": True}
    causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool).triu(1)[None, None]
    with on.routed.record(weight_version=4) as recording, torch.no_grad():
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 12)):
            positions, mask = torch.arange(start, stop).expand(2, -1), causal[:, :, start:stop, :stop]
            built(BATCH.ids_BT[:, start:stop], positions, mask, **cached)
            context.sequence_len_offset += stop - start
    trace = recording.trace()
    assert (trace.versions, trace.provenance["engine"]) == ((4,), "megatron-core")
    assert [trace.tokens(s).tolist() for s in range(2)] == BATCH.ids_BT.tolist()
    assert np.array_equal(np.sort(trace.expert_ids_NLK), np.sort(recorded(on, BATCH).expert_ids_NLK))
    built.train()
    with on.given() as given:
        step(on, trace, BATCH)
    require_followed(given, trace, BATCH)
    built.eval()
    with torch.no_grad(), on.routed.replay(trace):
        refuses(BatchMismatchError, "without a key-value cache", lambda: built(BATCH.ids_BT, None, causal, **cached))
        on.run(BATCH)

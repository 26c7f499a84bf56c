"""Which rows a model's batches have however it is called, and traces that are recorded."""

from functools import partial

import numpy as np
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams

from foreroute.adapters import megatron
from foreroute.adapters.megatron.forward_args import lengths_of
from foreroute.errors import BatchMismatchError, LayoutError, SpecMismatchError
from foreroute.layout import pack, pad
from foreroute.trace import DecisionStream
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import SHAPES, Cell
from tests.adapters.megatron.model_chunks import attached, build, initialize
from tests.adapters.megatron.one_rank import MegatronSubject, model
from tests.replay.session_subject import (
    batch_of,
    entering,
    foreign,
    recorded,
    refuses,
    replayed,
    require_followed,
    step,
)

WIDTH = 12
BATCH = batch_of(WIDTH, WIDTH)
PACKED = {"input_ids": BATCH.ids_BT.view(1, -1), "position_ids": torch.arange(WIDTH).repeat(2)[None], "labels": None}


def of_cell(cell):
    initialize(cell)
    on = MegatronSubject(build(cell)[0].train())
    return on, foreign(on.routed.spec, BATCH)


@on_ranks(2)
def test_routers_beside_the_decoder_are_named_on_every_stage():
    cell = SHAPES["multi-token prediction on the last stage"]
    _, routed = attached(cell)
    [name] = routed.native_routers
    assert name.startswith("mtp.layers.0.")
    assert len(routed.spec.layers) == cell.layers


@on_ranks(1)
def test_layouts_and_traces_of_other_batches_are_refused():
    on, other = MegatronSubject(model()), megatron.attach(model(moe_layer_freq=1))
    trace, layout = foreign(on.routed.spec, BATCH), partial(pad, side="right", order="sbhd", to=WIDTH)
    choices = trace.with_stream("indexer", DecisionStream.absent(8, trace.num_rows, layers=on.routed.spec.layers))
    longer = foreign(on.routed.spec, batch_of(15, 3))
    wider = on.routed.shard(trace, layout(trace.lengths, to=WIDTH + 4))
    shard, replay = (lambda *given: lambda: on.routed.shard(*given)), partial(entering, on.routed.replay)
    for error, said, call in (
        (SpecMismatchError, "routed layers", replay(foreign(other.spec, BATCH))),
        (LayoutError, "batch first", shard(trace, layout(trace.lengths, order="bshd"))),
        (LayoutError, "split already", shard(trace, layout(trace.lengths).split_sequence(2, 0))),
        (BatchMismatchError, "packed rows", shard(trace, pack([3, 4]))),
        (SpecMismatchError, r"no indexer.*replayed", replay(choices)),
        (SpecMismatchError, r"no indexer.*replayed", shard(choices, pack(trace.lengths))),
        (BatchMismatchError, r"rows on.*rank", lambda: replayed(on, wider, BATCH)),
        (BatchMismatchError, "up to 15", lambda: replayed(on, longer, BATCH)),
    ):
        refuses(error, said, call)


@on_ranks(1)
def test_tokens_are_not_taken_for_padding():
    """The trace of shorter sequences has the tokens of the longer ones, as far as it goes."""
    on, short = MegatronSubject(model()), batch_of(WIDTH - 2, WIDTH)
    trace, mask = foreign(on.routed.spec, short), ~short.real_BT
    for batch, given, said in (
        (short, None, None),
        (BATCH, mask, None),
        (BATCH, None, r"token \d+.*batch.*padding.*trace.* pass padding_mask"),
        (short, torch.zeros_like(mask), r"batch.*padding.*trace; 2 of"),
        (short, mask.flip(0) | mask, r"is padding.*batch.*token"),
    ):
        with on.routed.replay(trace), torch.no_grad():
            run = partial(on.run, batch, padding_mask=given)
            refuses(BatchMismatchError, said, run) if said else run()
            on.run(short)


@on_ranks(1)
def test_cumulative_lengths_that_do_not_ascend_from_0_are_refused():
    for wrong in ([0, 2**63 - 1, -(2**63), -1, 3], [0, 4, 2], [1, 3], [[0, 3]], [0.0, 3.0], []):
        refuses(BatchMismatchError, r"that ascend.*0", partial(lengths_of, torch.tensor(wrong)))


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


@on_ranks(1)
def test_packed_batches_with_rows_in_another_order_are_refused():
    """The newest Megatron turns rows around between attention and the router: shapes fit, and rows would not."""
    on, trace = of_cell(Cell(layers=2, packed=True))
    placed = on.routed.shard(trace, pack(trace.lengths))
    offsets = torch.tensor([0, WIDTH, 2 * WIDTH], dtype=torch.int32)
    packed = PackedSeqParams("thd", offsets, offsets, offsets, offsets, WIDTH, WIDTH)
    run = partial(on.run, BATCH, **PACKED, attention_mask=None, packed_seq_params=packed)
    for name in ("tokens_per_sample", "local_cp_size"):
        for session in (on.routed.replay(trace), on.routed.replay(placed), on.routed.record()):
            with session:
                setattr(packed, name, WIDTH)
                refuses(BatchMismatchError, f"packed_seq_params.{name}", run)
                setattr(packed, name, None)
                run()

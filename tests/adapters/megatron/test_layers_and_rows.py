"""Which routers belong to a model, which rows its batches have however it is called, and traces that are recorded."""

from functools import partial

import numpy as np
import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams

from foreroute.adapters import megatron
from foreroute.adapters.megatron.forward_args import lengths_of
from foreroute.errors import BatchMismatchError, LayoutError, ReplayError, SpecMismatchError
from foreroute.layout import pack, pad
from foreroute.trace import DecisionStream
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import SHAPES, Cell
from tests.adapters.megatron.model_chunks import attached


@on_ranks(1)
def test_wrapped_models_are_unwrapped():
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    built = on.model()
    wrapped = Wrapper(Wrapper(built))
    routed = megatron.attach(wrapped)
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)
    step = routed.replaying(lambda batches, model: on.forward(model, next(batches).ids))
    batch = type("Batch", (), {"ids": ids, "routes": trace})()
    with on.maps_given(routed) as maps:
        step(iter([batch]), wrapped)
    on.assert_followed(maps, trace)


@on_ranks(2)
def test_routers_beside_the_decoder_are_named_on_every_stage():
    _, routed = attached(SHAPES["multi-token prediction on the last stage"])
    [name] = routed.native_routers
    assert name.startswith("mtp.layers.0.")
    assert name.endswith(".router")
    assert len(routed.spec.layers) == SHAPES["multi-token prediction on the last stage"].layers
    _, routed = attached(SHAPES["a stage of dense layers"])
    assert routed.native_routers == ()


@on_ranks(1)
def test_layouts_and_traces_of_other_batches_are_refused():
    built, routed, ids, trace = on.prepared()
    other, _ = on.attached(moe_layer_freq=1)
    foreign = on.foreign(megatron.attach(other).spec, ids)
    on.refuses(SpecMismatchError, "routed layers", lambda: routed.replay(foreign).__enter__())
    batch_first = pad(trace.lengths, side="right", order="bshd", to=on.WIDTH)
    on.refuses(LayoutError, "batch first", lambda: routed.shard(trace, batch_first))
    split = pad(trace.lengths, side="right", order="sbhd", to=on.WIDTH).split_sequence(2, 0)
    on.refuses(LayoutError, "split already", lambda: routed.shard(trace, split))
    on.refuses(BatchMismatchError, "packed rows", lambda: routed.shard(trace, pack([3, 4])))
    choices = trace.with_stream("indexer", DecisionStream.absent(8, trace.num_rows, layers=routed.spec.layers))
    on.refuses(SpecMismatchError, "no indexer that can be replayed", lambda: routed.replay(choices).__enter__())
    on.refuses(SpecMismatchError, "no indexer that can be replayed", lambda: routed.shard(choices, pack(trace.lengths)))
    wider = pad(trace.lengths, side="right", order="sbhd", to=on.WIDTH + 4)
    on.refuses(
        BatchMismatchError, "rows on this rank", lambda: on.replayed(built, routed, routed.shard(trace, wider), ids)
    )
    longer = on.foreign(routed.spec, torch.cat([ids, ids], 1), lengths=(15, 3))
    on.refuses(BatchMismatchError, "up to 15", lambda: on.replayed(built, routed, longer, ids))


@on_ranks(1)
def test_tokens_are_not_taken_for_padding():
    """The trace of shorter sequences has the tokens of the longer ones, as far as it goes."""
    _, routed = on.attached()
    ids = on.tokens()
    shorter = on.foreign(routed.spec, ids).truncated(np.array([on.WIDTH - 2, on.WIDTH]))
    on.refuses(BatchMismatchError, "is padding to the trace and a token to the batch", replaying(routed, shorter, ids))
    lengths = (on.WIDTH - 2, on.WIDTH)
    padded = on.tokens(lengths=lengths)
    trace = on.foreign(routed.spec, padded, lengths=lengths)
    replaying(routed, trace, padded)()
    mask = torch.arange(on.WIDTH) >= torch.tensor(lengths)[:, None]
    mixed = torch.where(mask, ids, padded)
    replaying(routed, trace, mixed, padding_mask=mask)()
    on.refuses(BatchMismatchError, "pass padding_mask", replaying(routed, trace, mixed))
    on.refuses(
        BatchMismatchError, "by its padding_mask; 2 rows", replaying(routed, trace, padded, padding_mask=~mask & mask)
    )
    on.refuses(
        BatchMismatchError,
        "is a token to the trace",
        replaying(routed, trace, padded, padding_mask=mask.flip(0) | mask),
    )


def replaying(routed, trace, ids, **more):
    def run():
        with routed.replay(trace), torch.no_grad():
            on.forward(routed.chunks[0].trunk, ids, **more)

    return run


@on_ranks(1)
def test_what_waits_is_narrow():
    _, routed, ids, trace = on.prepared()
    placed = routed.shard(trace, pad(trace.lengths, side="right", order="sbhd"))
    assert placed.trace.expert_ids_NLK.dtype == np.uint8
    assert placed.trace.expert_ids_NLK.nbytes == ids.numel() * 2 * 2
    beside = placed.trace.valid_N, placed.row_R, placed.tokens_C
    assert sum(each.nbytes for each in beside) == ids.numel() * 9


@on_ranks(1)
def test_cumulative_lengths_that_do_not_ascend_from_0_are_refused():
    for wrong in ([0, 2**63 - 1, -(2**63), -1, 3], [0, 4, 2], [1, 3], [[0, 3]], [0.0, 3.0], []):
        with pytest.raises(BatchMismatchError, match=r"integers \[sequences \+ 1\].*ascend.*0"):
            lengths_of(torch.tensor(wrong))
    assert lengths_of(torch.tensor([0, 3, 3, 5], dtype=torch.int32)).tolist() == [3, 0, 2]


@on_ranks(1)
def test_static_inference_is_captured_in_the_same_type():
    """Prefill and steps over a cache give the routes of one forward over the whole, and replay in training."""
    [built], routed = attached(Cell(layers=2, as_shipped=True))
    built.eval()
    ids = on.tokens()
    context = StaticInferenceContext(2, on.WIDTH)
    causal = torch.ones(on.WIDTH, on.WIDTH, dtype=torch.bool).triu(1)[None, None]
    with routed.record(weight_version=4) as recording, torch.no_grad():
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 12)):
            positions = torch.arange(start, stop).expand(2, -1)
            mask = causal[:, :, start:stop, :stop]
            built(ids[:, start:stop], positions, mask, inference_context=context, runtime_gather_output=True)
            context.sequence_len_offset += stop - start
    trace = recording.trace()
    assert trace.versions == (4,)
    assert trace.provenance["engine"] == "megatron-core"
    assert [trace.tokens(s).tolist() for s in range(2)] == ids.tolist()
    whole = on.recorded(routed, ids)
    assert trace.expert_ids_NLK.shape == whole.expert_ids_NLK.shape
    assert np.array_equal(np.sort(trace.expert_ids_NLK), np.sort(whole.expert_ids_NLK))
    built.train()
    with on.maps_given(routed) as maps, routed.replay(trace):
        on.step(built, ids)
    on.assert_followed(maps, trace)
    with torch.no_grad(), routed.replay(trace):
        on.refuses(
            BatchMismatchError,
            "without a key-value cache",
            lambda: built.eval()(ids, None, causal, inference_context=context, runtime_gather_output=True),
        )
        on.forward(built, ids)


@on_ranks(1)
def test_packed_batches_with_rows_in_another_order_are_refused():
    """The newest Megatron turns rows around between attention and the router: shapes fit, and rows would not."""
    built, routed, ids, trace = packing()
    placed = routed.shard(trace, pack(trace.lengths))
    for name in ("tokens_per_sample", "local_cp_size"):
        offsets = torch.tensor([0, on.WIDTH, 2 * on.WIDTH], dtype=torch.int32)
        packed = PackedSeqParams("thd", offsets, offsets, offsets, offsets, on.WIDTH, on.WIDTH)
        run = partial(built, ids.view(1, -1), torch.arange(on.WIDTH).repeat(2)[None], None, packed_seq_params=packed)
        with routed.replay(trace), routed.record():
            run()
        setattr(packed, name, on.WIDTH)
        for session in (routed.replay(trace), routed.replay(placed), routed.record()):
            with session:
                on.refuses(BatchMismatchError, f"packed_seq_params.{name}", run)
                setattr(packed, name, None)
                run()
                setattr(packed, name, on.WIDTH)


@on_ranks(1)
def test_packed_parameters_of_a_padded_batch_do_not_make_it_packed():
    """They tell attention of its padding; rows stay in the order of the batch."""
    built, routed, ids, trace = packing()
    offsets = torch.tensor([0, on.WIDTH], dtype=torch.int32)
    packed = PackedSeqParams("sbhd", offsets, offsets, offsets, offsets, on.WIDTH, on.WIDTH)
    with on.maps_given(routed) as maps, routed.replay(trace), routed.record() as recording:
        built(ids, torch.arange(on.WIDTH).expand_as(ids), None, packed_seq_params=packed)
    on.assert_followed(maps, trace)
    assert recording.trace().equals(trace)


@on_ranks(1)
def test_embeddings_in_place_of_tokens_are_replayed_on_placed_routes():
    """As a model of images calls its language model: only the layout says what is where."""
    built, routed, ids, trace = on.prepared()
    embedded = built.embedding(ids, torch.arange(on.WIDTH).expand_as(ids))
    run = partial(built, None, None, torch.ones(on.WIDTH, on.WIDTH, dtype=torch.bool).triu(1), decoder_input=embedded)

    def replayed(routes):
        with routed.replay(routes):
            run()

    with on.maps_given(routed) as maps:
        replayed(routed.shard(trace, pad(trace.lengths, side="right", order="sbhd")))
    on.assert_followed(maps, trace)
    on.refuses(BatchMismatchError, "given no tokens", lambda: replayed(trace))
    fewer = trace.select([0])
    placed = routed.shard(fewer, pad(fewer.lengths, side="right", order="sbhd"))
    on.refuses(ReplayError, "sees only part of the batch", lambda: replayed(placed))


def packing():
    """A model that takes packed batches, attached, with tokens and routes that no router chose."""
    [built], routed = attached(Cell(layers=2, packed=True))
    ids = on.tokens()
    return built.train(), routed, ids, on.foreign(routed.spec, ids)

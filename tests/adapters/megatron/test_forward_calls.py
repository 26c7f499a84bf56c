"""Forwards that are called in other ways than with a padded batch of tokens or a plainly packed one."""

from functools import partial

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from foreroute.adapters import megatron
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.layout import pack, pad
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.model_chunks import build, initialize


@on_ranks(1)
def test_packed_batches_with_rows_in_another_order_are_refused():
    """The newest Megatron turns rows around between attention and the router: shapes fit, and rows would not."""
    initialize(Cell())
    built = build(Cell(layers=2, packed=True))[0].train()
    routed = megatron.attach(built)
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)
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
    initialize(Cell())
    built = build(Cell(layers=2, packed=True))[0].train()
    routed = megatron.attach(built)
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)
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

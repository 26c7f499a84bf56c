"""Canary routes: the adapter places the rows of a rank that Megatron's own functions send there.

Row numbers go through `get_batch_on_this_cp_rank` and `scatter_to_sequence_parallel_region` the way that tokens and
hidden states do. One process takes the place of each rank in turn, by torch's group that sends nothing: what cuts a
batch is arithmetic, so that more ranks can be asked about than this machine runs.
"""

import itertools

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from foreroute import RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.adapters import megatron
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import with_settings
from tests.adapters.megatron.micro_batches import Batch, expected_rows, layout_of
from tests.adapters.megatron.model_chunks import build, initialize

EXPERTS = 64
LENGTHS = {False: (16, 9, 1), True: (10, 7, 3, 16)}


@on_ranks(1)
def test_the_adapter_cuts_as_megatron_does():
    """For context and tensor ranks, in batches of both forms."""
    for (context_ranks, tensor_ranks), packed in itertools.product(((1, 1), (1, 2), (2, 2), (4, 1)), LENGTHS):
        of_ranks = rows_on_every_rank(context_ranks, tensor_ranks, packed)
        for rank, (seen_R, placed_R) in enumerate(of_ranks):
            where = f"rank {rank} of {context_ranks} x {tensor_ranks}, packed {packed}"
            assert np.array_equal(placed_R, seen_R), f"{where}, sees {seen_R} and was given {placed_R}"
        rows = np.concatenate([seen_R for seen_R, _ in of_ranks])
        assert np.array_equal(np.sort(rows[rows >= 0]), np.arange(sum(rows >= 0)))


@on_ranks(1)
def test_another_layout_is_seen():
    """The control: routes laid out with padding on the other side are on every rank, and in the wrong places."""
    of_ranks = rows_on_every_rank(2, 2, False, side="left")
    assert all(not np.array_equal(placed_R, seen_R) for seen_R, placed_R in of_ranks)


def rows_on_every_rank(context_ranks, tensor_ranks, packed, **laid_out):
    """Per rank: the rows that routers see, and those that the adapter has placed there, -1 for padding."""
    cell = with_settings(
        {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 4}, cp=context_ranks, tp=tensor_ranks, layers=1
    )
    batch = Batch(LENGTHS[packed], (), packed, align=2 * context_ranks * tensor_ranks, width=16)
    return [_rows_on(rank, cell, batch, laid_out) for rank in range(context_ranks * tensor_ranks)]


def _rows_on(rank, cell, batch, laid_out):
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cell.ranks)
    initialize(cell)
    routed = megatron.attach(build(cell))
    assert parallel_state.get_context_parallel_world_size() == cell.cp
    placed = routed.shard(_canaries(batch), layout_of(batch, **laid_out))
    given = placed.rows(placed.layers, torch.device("cpu"))
    return expected_rows(batch), np.where(given.real_R, given.ids_LRK[0, :, 0].int(), -1)


def _canaries(batch):
    """Row n of the trace picks expert n."""
    rows_N = np.arange(sum(batch.lengths))
    ids_N1K = np.stack([rows_N, (rows_N + 1) % EXPERTS], 1)[:, None]
    routes = np.split(ids_N1K, np.cumsum(batch.lengths)[:-1])
    spec = RoutingSpec(EXPERTS, 2, (RoutedLayer(0),))
    return RoutingTrace.from_sequences(spec, [np.zeros(n, int) for n in batch.lengths], routes)

"""Traces of micro-batches: made up, or put together from what every rank's dispatchers were given."""

import itertools

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from foreroute import RoutedLayer, RoutingSpec, RoutingTrace
from tests.adapters.megatron.micro_batches import PAD_ROW, expected_rows


def made_up(batch, layers, seed, experts=8, top_k=2, complete=False):
    """Routes that no router chose, for every row but each sequence's last, which an engine never computes."""
    rng = np.random.default_rng((seed, parallel_state.get_data_parallel_rank()))
    spec = RoutingSpec(experts, top_k, tuple(map(RoutedLayer, layers)))
    routes = [
        np.argsort(rng.random((n - 1 + complete, len(layers), experts)), axis=-1)[..., :top_k] for n in batch.lengths
    ]
    return RoutingTrace.from_sequences(spec, [t.numpy() for t in batch.tokens], routes)


def put_together(picks, batches, layers, experts=8, top_k=2):
    """The traces of the micro-batches, on every rank, from the picks of the routers on all ranks.

    Args:
        picks: per decoder layer of this rank and micro-batch, ids [R, K].
    """
    here = parallel_state.get_data_parallel_rank()
    mine = [
        (here, m, layer, expected_rows(batches[m]), ids_RK)
        for layer, of_layer in picks.items()
        for m, ids_RK in enumerate(of_layer)
    ]
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    rows = [np.full((sum(batch.lengths), len(layers), top_k), experts) for batch in batches]
    for replica, m, layer, rows_R, ids_RK in (part for parts in everywhere for part in parts):
        if replica == here:
            real = rows_R != PAD_ROW
            rows[m][rows_R[real], layers.index(layer)] = ids_RK[real]
    return [_trace(batch, rows_NLK, layers, experts, top_k) for batch, rows_NLK in zip(batches, rows, strict=True)]


def shifted(trace):
    """The same routes one row late in every sequence, as if prompts had a token more."""
    routes = [np.roll(ids_NLK, 1, axis=0) for ids_NLK, _ in _by_sequence(trace)]
    return RoutingTrace.from_sequences(trace.spec, [tokens for _, tokens in _by_sequence(trace)], routes)


def _by_sequence(trace):
    """(ids of the rows that have a route, tokens) of each sequence."""
    return [
        (trace.expert_ids_NLK[a:b][trace.valid_N[a:b]], trace.token_ids_N[a:b])
        for a, b in itertools.pairwise(trace.offsets)
    ]


def _trace(batch, rows_NLK, layers, experts, top_k):
    spec = RoutingSpec(experts, top_k, tuple(map(RoutedLayer, layers)))
    parts = np.split(rows_NLK, np.cumsum(batch.lengths)[:-1])
    return RoutingTrace.from_sequences(spec, [t.numpy() for t in batch.tokens], parts)

"""Replay in Megatron-Core's own schedule on the device: native bits and foreign routes, under every recomputation.

The models are those of `benchmarks/megatron.py`, without Transformer Engine, in a world of one rank. They run in a
process of their own: Megatron keeps its groups for good, and its stand-ins for CUDA change torch.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.gpu.megatron import SMALL
from benchmarks.harness.models import start_megatron, start_megatron_ranks
from benchmarks.megatron import MICRO_BATCHES, RECOMPUTE, SEQUENCES, Bench
from foreroute.testing.ranks import Workers
from foreroute.testing.routes import synthetic_trace
from tests.adapters.megatron.forked_ranks import server
from tests.gpu.bits import deterministic, differing
from tests.replay.session_subject import router_paths

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ON_A_CPU = "full"
"""The others are by night there: tests/adapters/megatron has them all."""
RECOMPUTED = [each if each == ON_A_CPU else pytest.param(each, marks=pytest.mark.exhaustive) for each in RECOMPUTE]


@pytest.fixture(scope="module")
def megatron(device, tmp_path_factory):
    """`megatron(function, ...)` calls it with the device where Megatron was started."""
    # which takes seconds, and whoever collects tests has no need of it
    pytest.importorskip("megatron.core", exc_type=ImportError)
    if device.type == "cpu":
        yield partial(forked, device)
        return
    folder = tmp_path_factory.mktemp("megatron")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(begin, str(folder), device).result()
        yield lambda function, *args: pool.submit(function, device, *args).result()


def begin(folder, device):
    torch.cuda.set_device(device)
    torch.set_num_threads(1)
    start_megatron(folder, device)


def forked(device, function, *args):
    """In a process forked from one that has imported Megatron, which no process that used CUDA may be."""
    with closing(Workers(1, timeout_s=300, forked_from=server)) as ranks:
        return ranks.run(started, function, device, *args)[0]


def started(rank, function, *args):
    start_megatron_ranks(1)
    return function(*args)


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_own_routes_are_native_bits_and_foreign_ones_obeyed(megatron, recompute):
    unsteady, changed = megatron(bits_without_and_with_replay, recompute)
    if unsteady:
        pytest.skip(f"the unpatched model does not repeat its own bits here: {sorted(unsteady)[0]}")
    assert not changed


def bits_without_and_with_replay(device, recompute):
    """What the unpatched model does not repeat, and what replay changes."""
    with sorted_picks(), deterministic():
        bench = Bench.of(RECOMPUTE[recompute], SMALL, device)
        require_obeyed(bench)
        first, again, replayed = (bits_of(bench, run) for run in (bench.native, bench.native, bench.replayed()))
    return differing(first, again), differing(first, replayed)


def bits_of(bench, run):
    losses = {f"losses of micro-batch {m}": found["losses"].clone() for m, found in enumerate(run())}
    return losses | {name: each.grad.clone() for name, each in bench.model.named_parameters() if each.grad is not None}


@contextmanager
def sorted_picks():
    """On a GPU Megatron-Core 0.19 sorts picks in forwards with gradients alone, and recomputes other bits."""
    top_k = torch.topk

    def in_order(*args, **kwargs):
        return top_k(*args, **{**kwargs, "sorted": True})

    with mock.patch.object(torch, "topk", in_order):
        yield


def require_obeyed(bench):
    """Every router picks, for every token, the experts of routes that are not its own."""
    foreign = []
    for seed, trace in enumerate(bench.traces):
        found = synthetic_trace(trace.spec, trace.lengths.tolist(), seed=seed, complete=True)
        foreign.append(replace(found, token_ids_N=trace.token_ids_N))
    with picks(bench) as picked:
        bench.replayed(traces=foreign)()
    for layer, maps in enumerate(picked):
        # where it is recomputed, a router runs twice before the next micro-batch begins
        runs = len(maps) // MICRO_BATCHES
        for number, picked_NE in enumerate(maps):
            own_NE, wanted_NE = (as_map(traces[number // runs], layer) for traces in (bench.traces, foreign))
            assert not np.array_equal(own_NE, wanted_NE), "the foreign routes are the model's own"
            assert np.array_equal(picked_NE, wanted_NE), f"routed layer {layer}: tokens went elsewhere"


def as_map(trace, layer):
    """Bool [N, E], one layer's picks."""
    ids_NK = trace.expert_ids_NLK[:, layer]
    map_NE = np.zeros((len(ids_NK), trace.spec.num_experts), np.bool_)
    np.put_along_axis(map_NE, ids_NK.astype(np.int64), True, axis=1)
    return map_NE


@contextmanager
def picks(bench):
    """By routed layer, what its router picks in each of its runs: bool [N, E], tokens of a sequence together."""
    picked = [[] for _ in router_paths(bench.routed)]
    with ExitStack() as stack:
        for maps, path in zip(picked, router_paths(bench.routed), strict=True):

            def keep(module, given, result, maps=maps):
                map_TBE = result[1].detach().view(-1, SEQUENCES, result[1].shape[-1])
                maps.append(map_TBE.transpose(0, 1).flatten(0, 1).cpu().numpy())

            stack.callback(bench.model.get_submodule(path).register_forward_hook(keep).remove)
        yield picked

"""Counts of what an executor posts, asks and launches in a planned step: in which order, how often, how many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from benchmarks.harness.models import run_model, spread_model
from benchmarks.harness.spread_bench import SIZES, HFBench, drawn
from foreroute.adapters import hf
from foreroute.ep import PlanExecution
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import ReplayError
from foreroute.plan import PlanOptions
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.trace import RoutingTrace

QUESTIONS = ("most", "gather", "from_first")
"""Methods of `RankConsensus`, each of which asks all ranks on the host."""


@dataclass
class Posted:
    """Messages of one rank: "layer" where one begins, "rows", "counts" and "weights"; questions; bytes of gradients."""

    order: list[str] = field(default_factory=list)
    questions: int = 0
    returned_bytes: int = 0

    @property
    def num_fetches(self) -> int:
        """Fetches of cells."""
        return self.order.count("weights")

    @property
    def num_behind_rows(self) -> int:
        """Fetches before which rows have left since the last routed layer began."""
        behind, has_left = 0, False
        for what in self.order:
            # a new layer starts over: rows of the one before hide nothing of it
            has_left = what == "rows" or (has_left and what != "layer")
            behind += what == "weights" and has_left
        return behind


@contextmanager
def posting(layers: Iterable[nn.Module]) -> Iterator[Posted]:
    """Count while the context is open; `layers` are the routed ones."""
    posted = Posted()
    # watched where calls leave for other ranks: the executor itself keeps no such counts
    post = PeerGroup.post

    def posting_messages(peers: PeerGroup, sends: Any, receives: Any, what: str) -> Any:
        if what.startswith("fetching"):
            posted.order.append("weights")
        elif what.startswith("returning"):
            posted.returned_bytes += sum(tensor.nbytes for _, _, tensor in receives)
        return post(peers, sends, receives, what)

    def posted_as(what: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def posting_it(*args: Any, **kwargs: Any) -> Any:
            posted.order.append(what)
            return collective(*args, **kwargs)

        return posting_it

    def asked(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asking(*args: Any, **kwargs: Any) -> Any:
            posted.questions += 1
            return ask(*args, **kwargs)

        return asking

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(PeerGroup, "post", posting_messages))
        for name, what in (("all_to_all_single", "rows"), ("all_gather", "counts")):
            stack.enter_context(mock.patch.object(dist, name, posted_as(what, getattr(dist, name))))
        for name in QUESTIONS:
            stack.enter_context(mock.patch.object(RankConsensus, name, asked(getattr(RankConsensus, name))))
        for layer in layers:
            hook = layer.register_forward_pre_hook(lambda *_: posted.order.append("layer"))
            stack.callback(hook.remove)
        yield posted


def waits_per_layer(rank: int, num_ranks: int) -> float:
    """Count waits of the host in forward and backward of a planned micro-step beyond the plain model's, by layer."""
    # on a device that stands in for a GPU, in a group of one rank: no backend sends what is on it to others
    routed = hf.attach(spread_model(SIZES))
    batches, traces = drawn(routed.spec)
    bench = HFBench.of(routed.model, routed, batches, [_without_last_tokens(trace) for trace in traces])
    unpatched = hf.build_model("qwen3_moe", seed=0, **SIZES.of_hf())
    with other_device() as device:
        batch = bench.batches[0].to(DEVICE)

        def waits(model: Any) -> int:
            device.reads.clear()
            run_model(model, batch)
            return device.reads.total()

        before = waits(unpatched.to(DEVICE))
        model, executing = bench.model.to(DEVICE), bench.executing(bench.plan(PlanOptions()))
        with suppress(ReplayError), executing, bench.routed.replay(bench.routes_M[0]):  # the others are not run
            found = waits(model)
    return (found - before) / len(bench.homes)


def _without_last_tokens(trace: RoutingTrace) -> RoutingTrace:
    """Leave out what engines do not bring: no router of theirs has seen the last token of a sequence."""
    valid_N = trace.valid_N.copy()
    valid_N[trace.offsets[1:] - 1] = False
    return replace(trace, valid_N=valid_N)


def busiest(executed_ML: NDArray[np.int64]) -> int:
    """The sum over cells of the busiest rank's assignments. A collective call."""
    most = torch.from_numpy(executed_ML.copy())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most.sum())


def summed(value: float) -> float:
    """Add over all ranks. A collective call."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def fetched_bytes(execution: PlanExecution) -> int:
    """Add the bytes of weights that came to replicas on all ranks. A collective call."""
    mine = [record.host_bytes + record.direct_bytes for record in execution.transfers if record.kind == "fetch"]
    return int(summed(sum(mine)))

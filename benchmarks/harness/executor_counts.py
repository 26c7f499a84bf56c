"""What an executor posts, asks and launches in one planned step, counted: in which order, how often, how many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from benchmarks.harness.execution_bench import SIZES, Bench, run_model
from benchmarks.harness.launch_path import Launches
from foreroute.adapters import hf
from foreroute.ep import PlanExecution
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import ReplayError
from foreroute.plan import PlanOptions
from foreroute.testing.counting_device import DEVICE, other_device

QUESTIONS = ("most", "gather", "from_first")
"""Methods of `RankConsensus`, each of which asks all ranks on the host."""


@dataclass
class Posted:
    """Of one rank.

    Attributes:
        order: "layer" where a routed layer begins its forward, "rows" for an all-to-all, "counts" for an all-gather,
            "weights" for a fetch.
        questions: that the host asked other ranks.
        returned_bytes: of gradients that arrived at their homes here.
    """

    order: list[str] = field(default_factory=list)
    questions: int = 0
    returned_bytes: int = 0

    @property
    def num_fetches(self) -> int:
        """Of cells."""
        return self.order.count("weights")

    @property
    def num_behind_rows(self) -> int:
        """Fetches before which rows have left since the last routed layer began."""
        behind, has_left = 0, False
        for what in self.order:
            has_left = what == "rows" or (has_left and what != "layer")
            behind += what == "weights" and has_left
        return behind


@contextmanager
def posting(layers: Iterable[nn.Module]) -> Iterator[Posted]:
    """Count while the context is open; `layers` are the routed ones."""
    posted = Posted()
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


def launches(work: Callable[[], object]) -> int:
    """Operators of aten, those of backward too."""
    counting = Launches()
    with counting:
        work()
    return counting.number


def _planned(bench: Bench) -> AbstractContextManager[object]:
    return bench.executing(bench.plan(PlanOptions()))


def waits_per_layer(
    rank: int, num_ranks: int, executing: Callable[[Bench], AbstractContextManager[object]] = _planned
) -> float:
    """Waits of the host in forward and backward of a micro-step beyond the unpatched model's, by layer.

    Executed as `executing` says, by default under a plan; on a device that stands in for a GPU, of sequences with their
    last token, in a group of one rank: no backend sends what is on that device to others.
    """
    bench = _without_routes_of_last_tokens(Bench.of(rank, num_ranks))
    unpatched = hf.build_model("qwen3_moe", seed=0, **SIZES)
    with other_device() as device:
        batch = bench.batches[0].to(DEVICE)

        def waits(model: Any) -> int:
            device.reads.clear()
            run_model(model, batch)
            return device.reads.total()

        before = waits(unpatched.to(DEVICE))
        model = bench.routed.model.to(DEVICE)
        with suppress(ReplayError), executing(bench), bench.routed.replay(bench.rows_M[0]):  # the others are not run
            found = waits(model)
    return (found - before) / len(bench.homes)


def _without_routes_of_last_tokens(bench: Bench) -> Bench:
    """As engines bring them: no router of theirs has seen the last token of a sequence."""
    rows_M = []
    for trace in bench.traces:
        valid_N = trace.valid_N.copy()
        valid_N[trace.offsets[1:] - 1] = False
        rows_M.append(bench.routed.rows(replace(trace, valid_N=valid_N)))
    return replace(bench, rows_M=rows_M, counts_MLGE=bench.routed.gather_counts(rows_M))


def busiest(executed_ML: NDArray[np.int64]) -> int:
    """The sum over cells of the busiest rank's assignments. A collective call."""
    most = torch.from_numpy(executed_ML.copy())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most.sum())


def summed(value: float) -> float:
    """Over all ranks. A collective call."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def fetched_bytes(execution: PlanExecution) -> int:
    """Of weights, that came to replicas on all ranks. A collective call."""
    mine = [record.host_bytes + record.direct_bytes for record in execution.transfers if record.kind == "fetch"]
    return int(summed(sum(mine)))

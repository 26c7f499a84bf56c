"""What an executor posts, asks and launches in one planned step, counted: in which order, how often, how many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

from benchmarks.harness.launch_path import Launches
from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.peers import PeerGroup

QUESTIONS = ("objections", "most", "gather", "from_first", "texts")
"""Methods of `RankConsensus`, each of which asks all ranks on the host."""


@dataclass
class Posted:
    """Of one rank.

    Attributes:
        order: "layer" where a routed layer begins its forward, "rows" for an all-to-all, "weights" for a fetch.
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
    begin, all_to_all = PeerGroup.begin, dist.all_to_all_single

    def beginning(peers: PeerGroup, sends: Any, receives: Any, what: str) -> Any:
        sends, receives = list(sends), list(receives)
        if what.startswith("fetching"):
            posted.order.append("weights")
        elif what.startswith("returning"):
            posted.returned_bytes += sum(message.tensor.nbytes for message in receives)
        return begin(peers, sends, receives, what)

    def leaving(*args: Any, **kwargs: Any) -> Any:
        posted.order.append("rows")
        return all_to_all(*args, **kwargs)

    def asked(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asking(*args: Any, **kwargs: Any) -> Any:
            posted.questions += 1
            return ask(*args, **kwargs)

        return asking

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(PeerGroup, "begin", beginning))
        stack.enter_context(mock.patch.object(dist, "all_to_all_single", leaving))
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

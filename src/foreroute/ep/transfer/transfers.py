"""Tensors on their way: messages between ranks and copies from host memory, posted together and waited for once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer.peers import Message, PeerGroup, collective_errors


class Transfer:
    """Data a rank sends, receives and copies from host memory in one go: to be posted, and then to be waited for."""

    # Sent tensors must not be written to, and received ones not be read, until `wait` returns. Both ends of a pair of
    # ranks list their messages in the same order.
    def __init__(
        self,
        peers: PeerGroup,
        what: str,
        sends: Sequence[Message],
        receives: Sequence[Message],
        copies: Sequence[tuple[Tensor, Tensor]] = (),  # source in host memory, and target
        lane: TransferLane | None = None,  # without one it goes in the order of the current stream
    ) -> None:
        self.what = what
        self.host_bytes = sum(target.nbytes for _, target in copies)
        self.direct_bytes = sum(tensor.nbytes for _, _, tensor in receives)
        self._peers, self._lane = peers, lane
        # Kept until `wait`: the memory of a copy that is sent must not be reused while the lane's stream reads it.
        self._sends, self._receives, self._copies = list(sends), list(receives), list(copies)
        self._works: list[dist.Work] = []
        self._arrived: torch.cuda.Event | None = None

    def post(self) -> Transfer:
        """Begin the transfer and return at once. A collective call of the peers."""
        lane = self._lane
        with nullcontext() if lane is None else lane.entered():
            self._works = self._peers.post(self._sends, self._receives, self.what)
            if lane is not None and lane.stream is not None:
                # streams alone know when it is over: the stream of the model waits for an event, the host for nothing
                self._complete()
                self._arrived = torch.cuda.Event()
                self._arrived.record()
        return self

    def wait(self) -> None:
        """Wait until all has left and arrived; on a GPU the current stream waits, and the host does not."""
        if self._lane is None or self._lane.stream is None:
            self._complete()
        else:
            assert self._arrived is not None, "it is posted"
            torch.cuda.current_stream(self._lane.stream.device).wait_event(self._arrived)
        self._sends, self._receives, self._copies = [], [], []

    def _complete(self) -> None:
        with torch.no_grad():
            for source, target in self._copies:
                target.copy_(source, non_blocking=True)
        with collective_errors(self.what, self._peers.group):
            for work in self._works:
                work.wait()
        # the group keeps the works until then
        self._works.clear()


def row_messages(
    moves: NDArray[np.void], column: str, rows: Mapping[str, Sequence[Tensor]], first: int = 0
) -> list[Message]:
    """List the messages of rows by name, in the order of the moves, whose `column` counts rows at this end."""
    names = sorted(rows)
    # `first` is the number among the peers of the rank that moves call 0
    columns = (moves["peer"] + first, moves["number"], moves[column])
    return [
        # what arrives lies in one piece in slots and buffers; of a home row that does not, a copy is sent
        (peer, number * len(names) + i, rows[name][row].contiguous())
        for peer, number, row in zip(*(each.tolist() for each in columns), strict=True)
        for i, name in enumerate(names)
    ]


class TransferLane:
    """Lane of transfers beside the model: on a GPU a stream. Elsewhere gloo has threads of its own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Launch on the stream, if there is one, behind what the current stream was given before."""
        if self.stream is None:
            yield
            return
        # slots may still be read on the current stream, and home rows written
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            yield

    def close(self, seconds: float) -> bool:
        """Wait so long for the stream, and say whether it is done."""
        end = time.monotonic() + seconds
        # a transfer whose peer is gone never ends, and synchronize() would wait for it
        while self.stream is not None and not self.stream.query():
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

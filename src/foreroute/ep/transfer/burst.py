"""The transfers of one cell under way: copies from host memory and receipts from peers, ended and verified in a thread.

A thread, because gloo tells that a message has arrived only to who waits for it, and waiting with a time limit would
break the connection to the peer for good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer.host_memory import HostMemory
from foreroute.ep.transfer.moves import Moves
from foreroute.ep.transfer.peers import CHECKSUMS, PeerGroup, carry, damaged, row_checksums, with_checksums


@dataclass(frozen=True)
class Channels:
    """What weights travel by.

    Attributes:
        peers: the direct path.
        memory: the host path; None where it is not used.
        checksums: verify what arrives.
    """

    peers: PeerGroup
    memory: HostMemory | None
    checksums: bool


class Burst:
    """Moves of home rows into slots. Beginning one is a collective call; waiting for it is not.

    Args:
        channels: of all ranks.
        moves: of all ranks, not empty.
        host_V: bool [V], those that go through host memory.
        layer: routed layer.
        home: name -> [E / G, ...], this rank's shard.
        slots: name -> [P, ...], written until the burst is over.
        what: the burst in words, for errors.
    """

    def __init__(
        self,
        channels: Channels,
        moves: Moves,
        host_V: NDArray[np.bool_],
        layer: int,
        home: Mapping[str, Tensor],
        slots: Mapping[str, Tensor],
        what: str,
    ) -> None:
        self.what = what
        rank = channels.peers.rank
        direct = moves.take(~host_V)
        self._channels, self._layer, self._slots = channels, layer, dict(slots)
        self._host = moves.take(host_V & (moves.target_V == rank))
        self._received = direct.take(direct.target_V == rank)
        row_bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in slots.values())
        self.host_bytes, self.direct_bytes = row_bytes * len(self._host), row_bytes * len(self._received)
        sources, targets = home, self._slots
        if channels.checksums:
            sources = with_checksums(home, direct.source_row_V[direct.source_V == rank].tolist())
            targets = with_checksums(slots, [])
        self._sums = targets.get(CHECKSUMS)
        self._side = _SideStream(next(iter(slots.values())).device)
        with self._side.entered():
            self._exchange = carry(channels.peers, direct, sources, targets, what)
        self._objection: str | None = None
        self._error: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> str | None:
        """What is wrong with what arrived at this rank, if only that it has not; None when all is well.

        Raises:
            TransferError: when a peer is gone.
        """
        if not self._over.wait(seconds):
            return f"replicas had not arrived after {seconds} s"
        if self._error is not None:
            raise self._error
        return self._objection

    @property
    def is_over(self) -> bool:
        """Whether nothing writes to the slots any more."""
        return self._over.is_set()

    def end(self, seconds: float) -> None:
        """Wait without a word."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            with torch.no_grad(), self._side.entered():
                stale = self._copy_from_host()
                self._exchange.wait()
                self._side.synchronize()
                self._objection = stale or self._verify()
        # whatever it is, it is for the thread that waits
        except Exception as error:
            self._error = error
        finally:
            self._over.set()

    def _copy_from_host(self) -> str | None:
        memory = self._channels.memory
        if memory is None or not len(self._host):
            return None
        sources = np.unique(self._host.source_V).tolist()
        before = [memory.objection(source) for source in sources]
        for source, row, slot in _rows(self._host):
            for name, slots in self._slots.items():
                slots[slot].copy_(memory.row(source, self._layer, name, row), non_blocking=True)
        self._side.synchronize()
        after = [memory.objection(source) for source in sources]
        return next((objection for objection in before + after if objection is not None), None)

    def _verify(self) -> str | None:
        if self._sums is None:
            return None
        wrong = damaged(self._slots, self._sums, self._received.target_row_V.tolist())
        if self._channels.memory is not None:
            for source, row, slot in _rows(self._host):
                if row_checksums(self._slots, slot) != self._channels.memory.checksums(source, self._layer, row):
                    wrong.append(slot)
        return f"the replicas in slots {sorted(wrong)} arrived damaged" if wrong else None


class _SideStream:
    """A CUDA stream that starts after what the current one was given; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            # the slots may still be read, and the home rows written, by kernels that were launched before
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def entered(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        # a new thread starts on device 0, where returning to its stream would make a context of this process
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _rows(moves: Moves) -> list[tuple[int, int, int]]:
    """Source rank, row there, and row here, of every move."""
    columns = (moves.source_V, moves.source_row_V, moves.target_row_V)
    return list(zip(*(column.tolist() for column in columns), strict=True))

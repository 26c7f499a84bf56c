"""Redundant slots: buffers for the weights of replicas, the record of what all ranks hold in them, and their filling.

The record is kept on every rank for all ranks, by the same calls in the same order, so that senders know what receivers
lack. Transfers write behind autograd's back: each filling raises the version counters, so that a backward pass that
still needs the old content is refused instead of silently wrong.

A `TransferBatch` is one filling: copies from host memory and receipts from peers. On a GPU with NCCL both are launched
on the stream of the `TransferLane`, whose end the stream of the model waits for; the host waits for nothing. Elsewhere
the thread of the lane ends batches one after the other: gloo tells that a message has arrived only to who waits for it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer.host_memory import HostMemory
from foreroute.ep.transfer.peers import PeerGroup, RowMoves, has_nccl, post
from foreroute.ep.transfer.replica_weights import Cell, Home, expert_bytes
from foreroute.errors import TransferError
from foreroute.plan import CellPlan, Topology
from foreroute.plan.options import SlotSharing
from foreroute.plan.schedule import CellSchedule

EMPTY = -1
"""In a table of slots: the slot holds no expert."""


class SlotSet:
    """P slots on every rank, for one cell at a time.

    Attributes:
        tensors: name -> [P, ...], this rank's slots.
        held_GP: int64 [G, P], the expert of `cell.layer` that every slot holds or is being sent; or `EMPTY`.
        cell: that the set was last given to.
        batch: transfers into the slots that have not been waited for yet.
    """

    def __init__(self, home: Home, topology: Topology) -> None:
        num_slots = topology.redundant_slots
        experts = {name: of_name[0].detach() for name, of_name in home.items()}
        self.tensors = {name: expert.new_empty((num_slots, *expert.shape)) for name, expert in experts.items()}
        self.held_GP = np.full((topology.num_ranks, num_slots), EMPTY, np.int64)
        self.cell: Cell | None = None
        self.batch: TransferBatch | None = None

    def assign(self, cell: Cell) -> None:
        """Give the set to a cell; what it holds of another layer is dropped."""
        if self.cell is None or self.cell.layer != cell.layer:
            self.clear()
        self.cell = cell

    def clear(self) -> None:
        """Take all slots for empty."""
        self.held_GP = np.full_like(self.held_GP, EMPTY)

    def holds(self, plan: CellPlan) -> bool:
        """Whether the slots of all ranks hold the replicas of a cell, or are being sent them."""
        return bool((self.held_GP[plan.rank_R, plan.slot_R] == plan.expert_R).all())

    def lacking(self, moves: CellSchedule, rank: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Give what slots do not hold yet, of what this rank lends and of what it serves in a cell."""
        lent, served = moves.lent, moves.served
        return (
            lent[self.held_GP[lent["peer"], lent["slot"]] != lent["expert"]],
            served[self.held_GP[rank, served["slot"]] != served["expert"]],
        )

    def expect(self, plan: CellPlan, *, fills_mine: bool) -> None:
        """Enter that the replicas of a cell are about to fill the slots, some of this rank's among them or none."""
        self.held_GP[plan.rank_R, plan.slot_R] = plan.expert_R
        if fills_mine:
            for tensor in self.tensors.values():
                torch.autograd.graph.increment_version(tensor)

    def replicas(self, moves: CellSchedule) -> dict[str, Tensor]:
        """Name -> [replicas here, ...] in order of slot: views where the slots are neighbours, else copies."""
        slots = np.sort(moves.served["slot"]).tolist()
        # Slots are distinct, so neighbours are those whose first and last are as far apart as they are many.
        if not slots or slots[-1] - slots[0] == len(slots) - 1:
            first = slots[0] if slots else 0
            return {name: tensor[first : first + len(slots)].detach() for name, tensor in self.tensors.items()}
        return {
            name: tensor.index_select(0, torch.tensor(slots).to(tensor.device, non_blocking=True))
            for name, tensor in self.tensors.items()
        }


class SlotSets:
    """All sets of slots of a rank, made when they are first needed.

    Args:
        use: "layer" keeps a set for each layer; "shared" takes the set that was used longest ago.
        num_shared: sets that layers of the same shapes share.
        homes: of the routed layers here.
        topology: ranks and slots.
    """

    def __init__(self, use: SlotSharing, num_shared: int, homes: Mapping[int, Home], topology: Topology) -> None:
        self._num_sets = 1 if use == "layer" else num_shared
        self._keys = {layer: layer if use == "layer" else _shapes(home) for layer, home in homes.items()}
        self._homes, self._topology = homes, topology
        # in the order of use, the latest last
        self._sets: dict[object, list[SlotSet]] = {key: [] for key in self._keys.values()}

    def __iter__(self) -> Iterator[SlotSet]:
        return (slots for ring in self._sets.values() for slots in ring)

    def of(self, cell: Cell) -> SlotSet:
        """The set of this cell, or the one that should be given to it: a new one, or the one used longest ago."""
        ring = self._sets[self._keys[cell.layer]]
        found = next((slots for slots in ring if slots.cell == cell), None)
        if found is None and len(ring) < self._num_sets:
            found = SlotSet(self._homes[cell.layer], self._topology)
        elif found is None:
            found = ring.pop(0)
        else:
            ring.remove(found)
        ring.append(found)
        return found


def _shapes(home: Home) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    return tuple((name, home[name][0].shape, home[name][0].dtype) for name in sorted(home))


class TransferLane:
    """The one thread of a rank's transfers, started when it is first needed, and on a GPU their one stream.

    The thread ends when the lane is closed, or when nobody holds it any more.

    Args:
        device: of the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Let the thread do it, after what it was given before."""
        self._jobs.put(job)
        if self._thread is None:
            # does not keep a process alive whose main thread ended by an error
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="transfers", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)

    def close(self, seconds: float) -> None:
        """Let the thread end when it has done what it was given, and wait so long for it."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(seconds)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Launch on the stream, if there is one."""
        if self.stream is None:
            yield
            return
        # a new thread starts on device 0, where returning to its stream would make a context of this process
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            yield

    def follow(self) -> None:
        """Launch nothing on the stream before what the current stream was given has run."""
        if self.stream is not None:
            # the slots may still be read, and the home rows written
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def synchronize(self) -> None:
        """Wait until the stream has run what it was given."""
        if self.stream is not None:
            self.stream.synchronize()


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        # with it goes the memory that it holds
        del job


@dataclass
class Channels:
    """What weights travel by.

    Attributes:
        peers: the direct path.
        memory: the host path; None where it is not used, or not yet.
        lane: what runs transfers beside the model.
    """

    peers: PeerGroup
    memory: HostMemory | None
    lane: TransferLane

    @property
    def by_stream(self) -> bool:
        """Whether streams alone know when a transfer is over."""
        return self.lane.stream is not None and has_nccl(self.peers.group)


class TransferBatch:
    """Moves of home rows into slots. Beginning one is a collective call; waiting for it is not.

    Args:
        channels: of all ranks.
        lent, served: `MOVE`s of rows that this rank sends and takes; not both empty on all ranks.
        layer: routed layer.
        home: of the layer, on this rank.
        slots: name -> [P, ...], written until the batch is over.
        what: the batch in words, for errors.
    """

    def __init__(
        self,
        channels: Channels,
        lent: NDArray[np.void],
        served: NDArray[np.void],
        layer: int,
        home: Home,
        slots: Mapping[str, Tensor],
        what: str,
    ) -> None:
        self.what = what
        self._channels, self._layer, self._slots = channels, layer, dict(slots)
        self._host, self._received = served[served["by_host"]], served[~served["by_host"]]
        sent = lent[~lent["by_host"]]
        row_bytes = expert_bytes(slots)
        self.host_bytes, self.direct_bytes = row_bytes * len(self._host), row_bytes * len(self._received)
        lane = channels.lane
        lane.follow()
        with lane.entered():
            self._exchange = post(
                channels.peers, RowMoves(sent, "row"), home, RowMoves(self._received, "slot"), self._slots, what
            )
        self._error: Exception | None = None
        self._over = threading.Event()
        self._arrived: torch.cuda.Event | None = None
        if channels.by_stream:
            with torch.no_grad(), lane.entered():
                self._copy_from_host()
                self._exchange.wait()
                self._arrived = torch.cuda.Event()
                self._arrived.record()
            self._over.set()
        else:
            lane.submit(self._run)

    def wait(self, seconds: float) -> None:
        """Wait until all has arrived; where streams alone know, the current stream waits, and the host does not.

        Raises:
            TransferError: when a peer is gone, or it takes longer than this.
        """
        if not self._over.wait(seconds):
            raise TransferError(
                f"{self.what}: rank {self._channels.peers.rank} had not got them after {seconds} s. Look for the first "
                "error in the logs of all ranks, then resume from the last checkpoint"
            )
        if self._error is not None:
            raise self._error
        if self._arrived is not None:
            torch.cuda.current_stream(next(iter(self._slots.values())).device).wait_event(self._arrived)

    def _run(self) -> None:
        lane = self._channels.lane
        try:
            with torch.no_grad(), lane.entered():
                self._copy_from_host()
                self._exchange.wait()
                lane.synchronize()
        # whatever it is, it is for the thread that waits
        except Exception as error:
            self._error = error
        finally:
            self._over.set()

    def _copy_from_host(self) -> None:
        """Launches the copies."""
        memory = self._channels.memory
        if memory is None:
            return
        for source, row, slot in _rows(self._host):
            for name, slots in self._slots.items():
                slots[slot].copy_(memory.row(source, self._layer, name, row), non_blocking=True)


def _rows(moves: NDArray[np.void]) -> list[tuple[int, int, int]]:
    """Source rank, row there, and slot here, of every move."""
    columns = (moves["peer"], moves["row"], moves["slot"])
    return list(zip(*(column.tolist() for column in columns), strict=True))

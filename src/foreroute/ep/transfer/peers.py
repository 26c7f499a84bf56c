"""Peer-to-peer sends and receives of rows, all posted at once, on a process group of their own.

Also what every rank needs for them: groups beside those that the model communicates on, and errors that tell a call
that did not come back in the words of whoever made it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import ForerouteError, TransferError

MESSAGES_PER_EXCHANGE = 2**16
EXCHANGES_IN_FLIGHT = 2**15
"""Together 31 bits, the positive half of a message's 32-bit tag: the exchange modulo this, and the number in it."""


@dataclass(frozen=True)
class Message:
    """One tensor on its way to or from a peer.

    Attributes:
        peer: rank in the group.
        number: of the message in its exchange, the same on both ends.
        tensor: contiguous; read or written in place.
    """

    peer: int
    number: int
    tensor: Tensor


class PeerGroup:
    """The ranks between which weights and gradients travel.

    On gloo it is a group of its own: transfers never mix with the collectives of the model. On NCCL it is the group
    whose ranks it joins, the model's own. Two communicators that are in use at the same time can deadlock; of one,
    everything runs in the order in which it is launched, and one thread launches, on all ranks in the same order.
    `batch_isend_irecv` takes the communicator of the collectives (docs/decisions, "One communicator").

    All ranks of the group must begin the same exchanges in the same order; what one of them holds may be empty. Whoever
    begins one and fails before it is over leaves no rank waiting: what was posted is still sent.

    Args:
        along, ranks: as in `own_group`, which it is made by.
        timeout_s: seconds after which a peer that does not answer is taken for dead; on NCCL, that of the group holds.

    Attributes:
        timeout_s: that holds.
    """

    def __init__(
        self, *along: dist.ProcessGroup, ranks: list[int] | None = None, timeout_s: float | None = None
    ) -> None:
        shared = along[-1] if along else dist.group.WORLD
        assert shared is not None, "torch.distributed has a default group once it is initialised"
        on_nccl = ranks is None and has_nccl(shared)
        self.group = shared if on_nccl else own_group(*along, ranks=ranks, timeout_s=timeout_s)
        self.timeout_s = _timeout_of(self.group).total_seconds()
        dist.barrier(self.group)
        if has_nccl(self.group) and torch.cuda.is_available():
            # NCCL wants all ranks in the first call on a group, and the first exchange may leave some out; the barrier
            # of a group that has gloo too is gloo's
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self.group)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self._begun = 0
        # gloo forgets what was posted and has not left yet with the handle of it: the peer would wait for its timeout
        self._under_way: list[Exchange] = []

    def begin(self, sends: Iterable[Message], receives: Iterable[Message], what: str) -> Exchange:
        """Post all messages and return at once.

        Args:
            sends: must not be written to until the exchange is over.
            receives: must not be read until then.
            what: the exchange in words, for errors.
        """
        sends, receives = list(sends), list(receives)
        assert all(m.number < MESSAGES_PER_EXCHANGE for m in (*sends, *receives)), "tags of two exchanges would overlap"
        first_tag = self._begun % EXCHANGES_IN_FLIGHT * MESSAGES_PER_EXCHANGE
        self._begun += 1
        host_buffers = []
        if any(travels_by_host(m.tensor, self.group) for m in (*sends, *receives)):
            sends = [replace(m, tensor=m.tensor.to("cpu", copy=True)) for m in sends]
            on_host = [replace(m, tensor=torch.empty_like(m.tensor, device="cpu")) for m in receives]
            host_buffers = [(m.tensor, buffer.tensor) for m, buffer in zip(receives, on_host, strict=True)]
            receives = on_host
        operations = [
            dist.P2POp(operation, m.tensor, group=self.group, tag=first_tag + m.number, group_peer=m.peer)
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for m in messages
        ]
        with collective_errors(what, self.group):
            # an empty batch is an error to torch
            works = dist.batch_isend_irecv(operations) if operations else []
        exchange = Exchange(what, self.rank, works, host_buffers)
        self._under_way = [earlier for earlier in self._under_way if earlier.works] + [exchange]
        return exchange


@dataclass
class Exchange:
    """Messages under way.

    Attributes:
        what: the exchange in words, for errors.
        rank: this one.
        works: of torch.
        host_buffers: where what arrives on the host is to go, and where it arrives.
    """

    what: str
    rank: int
    works: list[dist.Work]
    host_buffers: list[tuple[Tensor, Tensor]]

    def wait(self) -> None:
        """Return when everything has left and arrived; on NCCL at once, and the current stream waits.

        Raises:
            TransferError: when a peer is gone or does not answer within the group's timeout.
        """
        begun = time.monotonic()
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost_rank(self.what, self.rank, error, time.monotonic() - begun) from error
        for target, buffer in self.host_buffers:
            target.copy_(buffer)
        self.works, self.host_buffers = [], []


def has_nccl(group: dist.ProcessGroup) -> bool:
    """Whether NCCL carries the group's tensors on a GPU."""
    return "cuda:nccl" in dist.get_backend_config(group).split(",")


def travels_by_host(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the group's backend for the tensor's device is gloo, which sends from the host's memory alone."""
    return tensor.device.type != "cpu" and f"{tensor.device.type}:gloo" in dist.get_backend_config(group).split(",")


class RowMoves(NamedTuple):
    """One end of an exchange of rows.

    Attributes:
        moves: `MOVE`s of a schedule.
        rows: the column that counts the rows at this end.
        first: the number among the peers of the rank that moves call 0.
    """

    moves: NDArray[np.void]
    rows: str
    first: int = 0


def post(
    peers: PeerGroup,
    leaving: RowMoves,
    sources: Mapping[str, Tensor] | Mapping[str, Sequence[Tensor]],
    arriving: RowMoves,
    targets: Mapping[str, Tensor],
    what: str,
) -> Exchange:
    """Post rows of `sources` to their peers, and those that come from them into rows of `targets`, on all ranks alike.

    Args:
        peers: all ranks between which rows move.
        leaving: what this rank sends, in the order of posting.
        sources: name -> [rows, ...], or a tensor for each row.
        arriving: what this rank receives, in the order of posting. A move has the same number at both ends.
        targets: name -> [rows, ...]; the same names, widths and dtypes on all ranks.
        what: the exchange in words, for errors.
    """
    names = sorted(sources)
    sends = [
        Message(peer, number * len(names) + i, sources[name][row].detach().contiguous())
        for peer, number, row in _ends(leaving)
        for i, name in enumerate(names)
    ]
    receives = [
        Message(peer, number * len(names) + i, targets[name][row])
        for peer, number, row in _ends(arriving)
        for i, name in enumerate(names)
    ]
    return peers.begin(sends, receives, what)


def _ends(end: RowMoves) -> list[tuple[int, int, int]]:
    """Peer, number and row here of every move."""
    columns = (end.moves["peer"] + end.first, end.moves["number"], end.moves[end.rows])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _lost_rank(what: str, rank: int, error: Exception, seconds: float) -> TransferError:
    """The error of an exchange that another rank did not take part in."""
    # gloo adds advice of its own
    reason = str(error).splitlines()[0].partition(". ")[0]
    return TransferError(
        f"{what}: rank {rank} got no answer from another rank after {seconds:.1f} s ({reason}). "
        "A process died, or took no part: look for the first error in the logs of all ranks, then resume from the last "
        "checkpoint"
    )


def own_group(
    *along: dist.ProcessGroup,
    ranks: list[int] | None = None,
    timeout_s: float | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Make a new group.

    Args:
        along: groups that join its ranks; a collective call of each of them, one after the other. With two, as of rows
            and columns, every rank of the new group is reached by one step in each. The whole world by default.
        ranks: global ranks of the group, ascending, with this one among them; those of `along` by default.
        timeout_s: of its collectives, in seconds; by default that of the last of `along`, and no more than that of the
            whole world: groups of a device mesh have torch's default, whatever `init_process_group` was told.
        backend: that of the default group by default.
    """
    timeout = timedelta(seconds=timeout_s or 0)
    if timeout_s is None:
        timeout = min(_timeout_of(group) for group in (*along[-1:], dist.group.WORLD))
    if not along and ranks is None:
        everyone: dist.ProcessGroup = dist.new_group(timeout=timeout, backend=backend)
        return everyone
    for group in along or (None,):
        _level(group)
    members = dist.get_process_group_ranks(along[-1]) if ranks is None else ranks
    made: dist.ProcessGroup = dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True)
    return made


def _timeout_of(group: Any) -> timedelta:
    """The timeout of its collectives, or torch's default where its backend does not say."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return timeout


def _level(group: dist.ProcessGroup | None) -> None:
    """Let all ranks be in as many groups as the one that is in most, by groups of one rank.

    torch names a group that is made without the whole world after its members and the number of groups that the rank
    is in already. Where these differ, as between pipeline stages, ranks wait for one another under different names.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    counts = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, count, group=group)
    for _ in range(max(counts) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


@contextmanager
def collective_errors(what: str, group: dist.ProcessGroup, *, foreign: bool = False) -> Iterator[None]:
    """Turn what torch raises when a rank is lost into `TransferError`, while the context is open.

    Args:
        what: the collective call that is made in it, in words.
        group: on which it is made.
        foreign: whether others than we make it, so that what else they raise goes through.

    Raises:
        TransferError: when a rank is gone, or does not answer within the group's timeout.
    """
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        is_of_collectives = isinstance(error, dist.DistError) or "gloo" in str(error)
        if foreign and (isinstance(error, ForerouteError) or not is_of_collectives):
            raise
        raise _lost_rank(what, dist.get_rank(group), error, time.monotonic() - begun) from error

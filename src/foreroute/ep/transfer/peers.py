"""The ranks between which weights and gradients travel, the groups that they talk on, and errors of lost ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foreroute.errors import ForerouteError, TransferError

MESSAGES_PER_TRANSFER = 2**16
TRANSFERS_IN_FLIGHT = 2**15
"""Together 31 bits, the positive half of a message's 32-bit tag: the transfer modulo this, and the number in it."""
LOST = ("connect", "timed out", "timeout", "broken pipe", "socket", "remote process exited", "abort")
"""Words of gloo and NCCL about a peer that is gone or does not answer, and of nothing else."""
Message = tuple[int, int, Tensor]
"""Peer in the group, number in the transfer (the same at both ends), contiguous tensor that is read or written."""


class PeerGroup:
    """The ranks between which weights and gradients travel. Making one is a collective call.

    On gloo it is a group of its own: transfers never mix with the collectives of the model. On NCCL it is the group
    whose ranks it joins, the model's own. Two communicators that are in use at the same time can deadlock; of one,
    everything runs in the order in which it is launched, and one thread launches, on all ranks in the same order.
    `batch_isend_irecv` takes the communicator of the collectives (docs/decisions, "One communicator").
    """

    # arguments are those of `own_group`; on NCCL, the timeout of the shared group holds
    def __init__(
        self, *along: dist.ProcessGroup, ranks: list[int] | None = None, timeout_s: float | None = None
    ) -> None:
        shared = along[-1] if along else dist.group.WORLD
        assert shared is not None, "torch.distributed has a default group once it is initialised"
        on_nccl = ranks is None and has_nccl(shared)
        self.group = shared if on_nccl else own_group(*along, ranks=ranks, timeout_s=timeout_s)
        dist.barrier(self.group)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self._posted = 0
        # gloo forgets what was posted and has not left yet with the handle of it: the peer would wait for its timeout
        self._under_way: list[list[dist.Work]] = []

    def connect(self, device: torch.device) -> None:
        """Let tensors of a device travel. A collective call, before the first of them does."""
        if device.type == "cpu":
            return
        # gloo sends from the host's memory alone
        if f"{device.type}:gloo" in dist.get_backend_config(self.group).split(","):
            raise TransferError(
                f"experts are on {device}, and gloo carries no tensors of it from peer to peer; start "
                f'torch.distributed with backend "cpu:gloo,{device.type}:nccl"'
            )
        # NCCL wants all ranks in the first call on a group, and a transfer may leave some out. The barrier of a group
        # that has gloo too is gloo's.
        with collective_errors("connecting the ranks between which weights travel", self.group):
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> list[dist.Work]:
        """Post messages, which may be none, and return at once. All ranks post in the same order."""
        # a rank that posts and fails before it has waited leaves no other waiting: what was posted is still sent
        assert all(number < MESSAGES_PER_TRANSFER for _, number, _ in (*sends, *receives)), "tags would overlap"
        first_tag = self._posted % TRANSFERS_IN_FLIGHT * MESSAGES_PER_TRANSFER
        self._posted += 1
        operations = [
            dist.P2POp(operation, tensor, group=self.group, tag=first_tag + number, group_peer=peer)
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, number, tensor in messages
        ]
        with collective_errors(what, self.group):
            # an empty batch is an error to torch
            works = dist.batch_isend_irecv(operations) if operations else []
        # who waits for works clears the list
        self._under_way = [earlier for earlier in self._under_way if earlier] + [works]
        return works


def has_nccl(group: dist.ProcessGroup) -> bool:
    return "cuda:nccl" in dist.get_backend_config(group).split(",")


def own_group(
    *along: dist.ProcessGroup,
    ranks: list[int] | None = None,
    timeout_s: float | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Make a new group, which lives until torch.distributed ends.

    It is a collective call of the groups `along`, one after the other, which join its ranks: with two, as of rows and
    columns, every rank is reached by one step in each. Its global `ranks`, ascending, are those of the last of `along`
    by default, and the whole world without any.
    """
    # Nobody destroys it before: torch names a group after its ranks and the number of groups that there are, so the
    # next one of the same ranks would have the name, and look for its peers at the addresses, of one that was destroyed
    timeout = timedelta(seconds=timeout_s or 0)
    if timeout_s is None:
        # groups of a device mesh have torch's default, whatever `init_process_group` was told
        timeout = min(_timeout_of(group) for group in (*along[-1:], dist.group.WORLD))
    if not along and ranks is None:
        everyone: dist.ProcessGroup = dist.new_group(timeout=timeout, backend=backend)
        return everyone
    for group in along or (None,):
        _level_group_counts(group)
    members = dist.get_process_group_ranks(along[-1]) if ranks is None else ranks
    made: dist.ProcessGroup = dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True)
    return made


def _timeout_of(group: Any) -> timedelta:
    # a backend that does not say has torch's default
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return timeout


def _level_group_counts(group: dist.ProcessGroup | None) -> None:
    """Let all ranks be in as many groups as the one that is in most, by groups of one rank."""
    # The name of the next group has this number in it. Where it differs, as between pipeline stages, ranks wait for one
    # another under different names. torch tells it nowhere else.
    count = len(dist.distributed_c10d._world.pg_names)
    counts = gather_objects(count, group or dist.group.WORLD, "counting groups of ranks")
    for _ in range(max(counts) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def gather_objects(mine: object, group: Any, what: str) -> list[Any]:
    """Return what each rank of a group holds, by its number there. A collective call; None is a group of this rank."""
    if group is None or dist.get_world_size(group) == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size(group)
    with collective_errors(what, group):
        dist.all_gather_object(found, mine, group=group)
    return found


@contextmanager
def collective_errors(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turn what torch raises when a rank is gone or does not answer into `TransferError`. Other errors go through."""
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        of_backend = isinstance(error, dist.DistError) or "gloo" in str(error)
        if isinstance(error, ForerouteError) or not (of_backend and any(word in str(error).lower() for word in LOST)):
            raise
        # gloo adds advice of its own
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise TransferError(
            f"{what}: rank {dist.get_rank(group)} got no answer from another rank after "
            f"{time.monotonic() - begun:.1f} s ({reason}). A process died, or took no part: look for the first error "
            "in the logs of all ranks, then resume from the last checkpoint"
        ) from error

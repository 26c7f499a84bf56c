"""The host path: experts of a node's ranks, once per version of the weights, in memory that its ranks share.

A *version* is the weights between two optimizer steps. Each rank writes experts into its own part, between two votes
of all ranks: none reads the last version any more, and all have written the next one. So what is read is never half old
and half new. For CUDA the memory is page-locked, and rows are copied by a stream of their own; those branches have run
on one GPU.

    shards of rank 0 │ … │ shards of rank W - 1        W ranks of the node

The memory is a file that no crash leaves behind: it loses its name as soon as everyone has opened it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.replica_weights import Home, device_of
from foreroute.errors import TransferError
from foreroute.plan import Topology

DIRECTORY = Path("/dev/shm")
ALIGNMENT = 64
"""Bytes of a cache line, so that ranks that write side by side share none; a multiple of the size of every dtype."""
PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device, whichever is the current one."""


class HostMemory:
    """Published home shards. Making one, `publish` and nothing else are collective calls.

    Args:
        consensus: of all expert-parallel ranks.
        topology: ranks of a node share memory.
        homes: of routed layers, of the same shapes and dtypes on all ranks.
        directory: where shared memory is.

    Attributes:
        per_node: ranks that share it.

    Raises:
        TransferError: on every rank alike, when the memory cannot be had on one.
    """

    def __init__(
        self,
        consensus: RankConsensus,
        topology: Topology,
        homes: Mapping[int, Home],
        *,
        directory: Path = DIRECTORY,
    ) -> None:
        self._consensus, self.per_node = consensus, topology.ranks_per_node
        self._mine = consensus.rank % self.per_node
        bytes_ = _map_shared(consensus, self.per_node, _num_bytes(homes, self.per_node), directory)
        self._shards_WL = _cut(bytes_, homes, self.per_node)
        self._unlock: weakref.finalize[[Tensor, torch.device], HostMemory] | None = None
        device = device_of(homes)
        if device.type == "cuda":
            objection = _page_lock(bytes_, device)
            if objection is None:
                # it holds the memory, so that it is unlocked before it is given back, even without `close`
                self._unlock = weakref.finalize(self, _page_unlock, bytes_, device)
                self._unlock.atexit = False  # the end of the process unlocks too
            try:
                _raise_objections(consensus, objection, "page-locking the shared memory")
            except TransferError:
                self.close()
                raise

    def close(self) -> None:
        """Make the memory ordinary again, as it must be before it is given back. A second call does nothing."""
        if self._unlock is not None:
            self._unlock()

    def publish(self, homes: Mapping[int, Home], rows: Mapping[int, Sequence[int]] | None = None) -> None:
        """Write the next version, or what it lacks. What this rank copies of these rows must be over.

        Args:
            homes: what this rank holds.
            rows: of its shards that are written, by layer; all by default.

        Raises:
            TransferError: on every rank alike, when a rank does not follow.
        """
        what = "publishing the weights"
        _raise_objections(self._consensus, None, what)
        for layer, home in homes.items():
            for name, experts in home.items():
                target = self._shards_WL[self._mine][layer][name]
                for row in range(len(experts)) if rows is None else rows[layer]:
                    target[row].copy_(experts[row].detach())
        _raise_objections(self._consensus, None, what)

    def row(self, source: int, layer: int, name: str, row: int) -> Tensor:
        """One expert of the shard of rank `source` of this node, as it was published last."""
        return self._shards_WL[source % self.per_node][layer][name][row]


def _map_shared(consensus: RankConsensus, per_node: int, num_bytes: int, directory: Path) -> Tensor:
    """uint8 [num_bytes], the same memory for all ranks of a node, without a name by the time this returns."""
    first = consensus.rank - consensus.rank % per_node
    file, objection = None, None
    if consensus.rank == first:
        file, objection = _try_create(directory, num_bytes)
    try:
        _raise_objections(consensus, objection, "taking shared memory")
        path = consensus.texts("" if file is None else str(file.path), "naming the shared memory")[first]
        bytes_, objection = open_shared(path, num_bytes)
        _raise_objections(consensus, objection, "opening the shared memory")
    finally:
        if file is not None:
            file.unname()
    return bytes_


def open_shared(path: str, num_bytes: int) -> tuple[Tensor, str | None]:
    """uint8 [num_bytes], mapped from a file that another process has made, or what is wrong."""
    # torch would make a file that is missing, and every machine would share memory with itself
    if Path(path).exists():
        try:
            return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8), None
        except RuntimeError as error:
            return torch.empty(0, dtype=torch.uint8), f"cannot map {path}: {str(error).splitlines()[0]}"
    return torch.empty(0, dtype=torch.uint8), (
        f"{path}, which the first rank of its node has made, is not there: they are on different machines, or in "
        "containers that share no memory. Give the topology the ranks per node that are true"
    )


def _try_create(directory: Path, num_bytes: int) -> tuple[NamedFile | None, str | None]:
    try:
        remove_stale_files(directory)
        return create_file(directory, num_bytes), None
    except OSError as error:
        free = "unknown"
        if directory.is_dir():
            status = os.statvfs(directory)
            free = f"{status.f_bavail * status.f_frsize / 1e9:.3g} GB"
        return None, (
            f"cannot take {num_bytes / 1e9:.3g} GB of shared memory in {directory}: {error.strerror} ({free} free). "
            "Make it larger (docker run --shm-size), name another directory, or use the direct path alone "
            "(paths='direct')"
        )


def _raise_objections(consensus: RankConsensus, mine: str | None, what: str) -> None:
    if objections := consensus.objections(mine, what):
        raise TransferError(f"{what} failed: " + "; ".join(objections))


def _num_bytes(homes: Mapping[int, Home], per_node: int) -> int:
    return per_node * sum(_aligned(_shard_bytes(experts)) for home in homes.values() for experts in home.values())


def _cut(bytes_: Tensor, homes: Mapping[int, Home], per_node: int) -> list[dict[int, dict[str, Tensor]]]:
    """Shards by rank of the node, layer and name, as views."""
    at, shards_WL = 0, []
    for _ in range(per_node):
        layers: dict[int, dict[str, Tensor]] = {}
        for layer, home in homes.items():
            layers[layer] = {}
            for name in sorted(home):
                first, size = home[name][0], _shard_bytes(home[name])
                layers[layer][name] = bytes_[at : at + size].view(first.dtype).view(len(home[name]), *first.shape)
                at += _aligned(size)
        shards_WL.append(layers)
    return shards_WL


def _shard_bytes(experts: Tensor | Sequence[Tensor]) -> int:
    return len(experts) * experts[0].numel() * experts[0].element_size()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _page_lock(bytes_: Tensor, device: torch.device) -> str | None:
    """Let CUDA copy from this memory without a stop on the way. What is wrong, or None."""
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(bytes_.data_ptr(), bytes_.numel(), PORTABLE)
        if int(status) == 0:
            return None
        # CUDA keeps the error until somebody asks, which is whoever launches a kernel next
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    return (
        f"CUDA cannot page-lock {bytes_.numel() / 1e9:.3g} GB of shared memory ({cudart.cudaGetErrorString(status)}, "
        f"error {int(status)}); raise `ulimit -l`, or use the direct path alone (paths='direct')"
    )


def _page_unlock(bytes_: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(bytes_.data_ptr())


@dataclass(frozen=True)
class NamedFile:
    """A file that still has its name, locked as long as it has.

    Attributes:
        path: for others to open.
        descriptor: holds the lock; the system lets it go when the process dies, however it dies.
    """

    path: Path
    descriptor: int

    def unname(self) -> None:
        """Remove the name. Who has the file open keeps it; the last to close it gives the memory back."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


def create_file(directory: Path, num_bytes: int) -> NamedFile:
    """A new file of zeros, all of its memory taken.

    Raises:
        OSError: when the directory cannot hold it; nothing is left then. A write into a file that was only given its
            length would end the process instead (SIGBUS).
    """
    file = _locked(directory)
    try:
        os.posix_fallocate(file.descriptor, 0, num_bytes)
    except OSError:
        file.unname()
        raise
    return file


def remove_stale_files(directory: Path) -> int:
    """Remove this user's files whose makers died before they unnamed them. Returns how many."""
    removed = 0
    # A maker holds the lock as long as the file has its name, so a lock that can be had is a dead maker's.
    for path in directory.glob(f"{_prefix()}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
            finally:
                os.close(descriptor)
    return removed


def _locked(directory: Path) -> NamedFile:
    while True:
        path = directory / f"{_prefix()}{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return NamedFile(path, descriptor)
        # another process took it for stale between its creation and its lock
        os.close(descriptor)


def _prefix() -> str:
    return f"foreroute-{os.getuid()}-"

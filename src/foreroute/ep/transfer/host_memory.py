"""The host path: experts of a node's ranks, once per version of the weights, in memory that its ranks share.

A *version* is the weights between two optimizer steps. Each rank writes its experts between two votes of all ranks:
none reads the last version any more, and all have written the next one. So what is read is never half old and half new.

Only experts that a plan sends within their node have room, a *berth* each. Berths are used again in later steps, and
taken in addition where a plan sends more: a file for those that lack, by the first rank of the node. No crash leaves a
file behind: it loses its name as soon as everyone has opened it. For CUDA, each rank page-locks the berths that it
writes or reads; those branches have run on one GPU.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.cells import Home, device_of
from foreroute.errors import TransferError

DIRECTORY = Path("/dev/shm")
ALIGNMENT = 64
"""Bytes of a cache line; a multiple of the size of every dtype."""
PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device, whichever is the current one."""
Shapes = tuple[tuple[str, torch.Size, torch.dtype], ...]
"""(name, shape, dtype) of each tensor of an expert, by name."""


@dataclass(eq=False)
class Berth:
    """Shared memory of one expert."""

    bytes_: Tensor  # uint8, whole pages
    tensors: dict[str, Tensor]  # views of them
    is_locked: bool = False


class HostMemory:
    """Experts that the `per_node` ranks of a node publish for each other. `publish` alone is a collective call."""

    def __init__(
        self, consensus: RankConsensus, homes: Mapping[int, Home], per_node: int, *, directory: Path = DIRECTORY
    ) -> None:
        self.per_node = per_node
        self._consensus, self._homes, self._directory = consensus, homes, directory
        self._device = device_of(homes)
        self._shapes = {layer: shapes_of(home) for layer, home in homes.items()}
        self._berths: dict[tuple[int, int], Berth] = {}  # of the experts of this node, by layer and id
        # by the expert that had one last, so that it gets the same one again, which its readers have page-locked
        self._free: dict[Shapes, dict[object, Berth]] = defaultdict(dict)
        # what all nodes have published of the weights as they are now, and for which of their ranks
        self._published_LEW: NDArray[np.bool_] | None = None
        self._locked: list[Tensor] = []
        # makes the memory ordinary again, as it must be before it is given back, even where nobody calls it
        self.close = weakref.finalize(self, _page_unlock, self._locked, self._device)
        self.close.atexit = False  # the end of the process unlocks too

    def forget(self) -> None:
        """Take all berths for free, since the weights have changed. What this rank copies of them must be over."""
        for expert, berth in self._berths.items():
            self._free[self._shapes[expert[0]]][expert] = berth
        self._berths, self._published_LEW = {}, None

    def publish(self, home_LE: NDArray[np.integer], sent_LEW: NDArray[np.bool_]) -> bool:
        """Write the experts that are not there yet. Returns whether anything was lacking, on any rank.

        `sent_LEW`: bool [L, E, W], whether the w-th rank of an expert's node reads it; on all ranks the same.
        """
        known_LEW = np.zeros_like(sent_LEW) if self._published_LEW is None else self._published_LEW
        layers, (node, number) = list(self._homes), divmod(self._consensus.rank, self.per_node)
        if not (sent_LEW & ~known_LEW)[layers].any():
            return False
        here_LE = home_LE // self.per_node == node
        missing_LE = here_LE & sent_LEW.any(axis=-1) & ~known_LEW.any(axis=-1)
        missing = [(layer, int(expert)) for layer in layers for expert in np.flatnonzero(missing_LE[layer])]
        self._take_berths(missing)
        is_mine_LE = home_LE == self._consensus.rank
        with self._consensus.agree("publishing the weights", TransferError):
            self._page_lock(missing_LE & is_mine_LE | here_LE & sent_LEW[..., number])
            self._write([(layer, expert) for layer, expert in missing if is_mine_LE[layer, expert]], is_mine_LE)
        self._published_LEW = known_LEW | sent_LEW
        return True

    def expert(self, layer: int, expert: int) -> dict[str, Tensor]:
        """Return the tensors of one expert of this node, by name, as it was published last."""
        return self._berths[layer, expert].tensors

    def _take_berths(self, experts: list[tuple[int, int]]) -> None:
        """Give each expert a berth, the same on all ranks of a node, which call this together."""
        wanted = Counter(self._shapes[layer] for layer, _ in experts)
        lacking = {shapes: max(0, number - len(self._free[shapes])) for shapes, number in wanted.items()}
        num_bytes = sum(number * _berth_bytes(shapes) for shapes, number in lacking.items())
        # the same vote says that no rank reads the last version any more
        if self._consensus.most(torch.tensor([num_bytes]), "taking shared memory").item():
            bytes_, at = self._map_shared(num_bytes), 0
            for shapes, number in lacking.items():
                for _ in range(number):
                    end = at + _berth_bytes(shapes)
                    self._free[shapes][object()] = _berth(bytes_[at:end], shapes)
                    at = end
        # those with a berth of their own first, before others take it
        for key in sorted(experts, key=lambda each: each not in self._free[self._shapes[each[0]]]):
            free = self._free[self._shapes[key[0]]]
            self._berths[key] = free.pop(key if key in free else next(iter(free)))

    def _map_shared(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], the same memory for all ranks of a node, without a name by the time this returns."""
        consensus, file = self._consensus, None
        first = consensus.rank - consensus.rank % self.per_node
        bytes_ = torch.empty(0, dtype=torch.uint8)
        try:
            with consensus.agree("taking shared memory", TransferError):
                if consensus.rank == first and num_bytes:
                    file = _create_swept(self._directory, num_bytes)
            path = consensus.texts("" if file is None else str(file.path), "naming the shared memory")[first]
            with consensus.agree("opening the shared memory", TransferError):
                if num_bytes:
                    bytes_ = open_shared(path, num_bytes)
        finally:
            if file is not None:
                file.unname()
        return bytes_

    def _page_lock(self, used_LE: NDArray[np.bool_]) -> None:
        """Page-lock the berths of these experts, those that are not."""
        if self._device.type != "cuda":
            return
        for (layer, expert), berth in self._berths.items():
            if used_LE[layer, expert] and not berth.is_locked:
                _page_lock(berth.bytes_, self._device)
                berth.is_locked = True
                self._locked.append(berth.bytes_)

    def _write(self, experts: list[tuple[int, int]], is_mine_LE: NDArray[np.bool_]) -> None:
        """Copy these experts of this rank to their berths, all at once, and wait for them once."""
        with torch.no_grad():
            for layer, expert in experts:
                # a shard has the experts of its rank in ascending order of their id
                row = int(is_mine_LE[layer, :expert].sum())
                for name, target in self._berths[layer, expert].tensors.items():
                    target.copy_(self._homes[layer][name][row].detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def shapes_of(home: Home) -> Shapes:
    """Return what tells layers whose experts can lie in the same memory."""
    return tuple((name, home[name][0].shape, home[name][0].dtype) for name in sorted(home))


def _berth_bytes(shapes: Shapes) -> int:
    """Return whole pages: memory is locked by pages, and by each of its users alone."""
    num_bytes = sum(_aligned(shape.numel() * dtype.itemsize, ALIGNMENT) for _, shape, dtype in shapes)
    return _aligned(num_bytes, mmap.PAGESIZE)


def _berth(bytes_: Tensor, shapes: Shapes) -> Berth:
    tensors, at = {}, 0
    for name, shape, dtype in shapes:
        size = shape.numel() * dtype.itemsize
        tensors[name] = bytes_[at : at + size].view(dtype).view(shape)
        at += _aligned(size, ALIGNMENT)
    return Berth(bytes_, tensors)


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def open_shared(path: str, num_bytes: int) -> Tensor:
    """Map a file that another process has made, uint8 [num_bytes], or raise `TransferError`."""
    # torch would make a file that is missing, and every machine would share memory with itself
    if not Path(path).exists():
        raise TransferError(
            f"{path}, which the first rank of its node has made, is not there: they are on different machines, or in "
            "containers that share no memory. Give the topology the ranks per node that are true"
        )
    try:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise TransferError(f"cannot map {path}: {str(error).splitlines()[0]}") from error


def _create_swept(directory: Path, num_bytes: int) -> NamedFile:
    """Make a file where stale ones have been removed, or raise `TransferError`."""
    try:
        remove_stale_files(directory)
        return create_file(directory, num_bytes)
    except OSError as error:
        free = "unknown"
        if directory.is_dir():
            status = os.statvfs(directory)
            free = f"{status.f_bavail * status.f_frsize / 1e9:.3g} GB"
        raise TransferError(
            f"cannot take {num_bytes / 1e9:.3g} GB of shared memory in {directory}: {error.strerror} ({free} free). "
            "Make it larger (docker run --shm-size), name another folder (shared_memory), or use the direct path alone "
            "(paths='direct')"
        ) from error


def _page_lock(bytes_: Tensor, device: torch.device) -> None:
    """Let CUDA copy from this memory without a stop on the way, or raise `TransferError`."""
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(bytes_.data_ptr(), bytes_.numel(), PORTABLE)
        if int(status) == 0:
            return
        # CUDA keeps the error until somebody asks, which is whoever launches a kernel next
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    raise TransferError(
        f"CUDA cannot page-lock {bytes_.numel() / 1e9:.3g} GB of shared memory ({cudart.cudaGetErrorString(status)}, "
        f"error {int(status)}); raise `ulimit -l`, or use the direct path alone (paths='direct')"
    )


def _page_unlock(locked: list[Tensor], device: torch.device) -> None:
    for bytes_ in locked:
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(bytes_.data_ptr())


@dataclass(frozen=True)
class NamedFile:
    """A file that still has its name, locked as long as it has."""

    path: Path
    descriptor: int  # holds the lock; the system lets it go when the process dies, however it dies

    def unname(self) -> None:
        """Remove the name. Who has the file open keeps it; the last to close it gives the memory back."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


def create_file(directory: Path, num_bytes: int) -> NamedFile:
    """Make a new file of zeros, locked, all of its memory taken. On an `OSError` nothing is left."""
    file = _create_locked(directory)
    try:
        # a write into a file that was only given its length would end the process where memory runs out (SIGBUS)
        os.posix_fallocate(file.descriptor, 0, num_bytes)
    except OSError:
        file.unname()
        raise
    return file


def remove_stale_files(directory: Path) -> None:
    """Remove this user's files whose makers died before they unnamed them."""
    # A maker holds the lock as long as the file has its name, so a lock that can be had is a dead maker's.
    for path in directory.glob(f"{_prefix()}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _create_locked(directory: Path) -> NamedFile:
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

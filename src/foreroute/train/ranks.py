"""The processes of a run: the device of each, how they find each other, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.peers import collective_errors
from foreroute.errors import ConfigError, DivergedError, ForerouteError, RankError
from foreroute.train.policy import CPU, Alone

WORK_TIMEOUT_S = 86400.0
"""A day. Ranks wait this long for the work of others, such as a warm start; one that dies is noticed at once, since its
connection closes. `parallel.timeout_s` is for exchanges in the middle of a pass."""

BACKENDS = {"cpu": "gloo", "cuda": "cuda:nccl,cpu:gloo"}
"""For torch.distributed, by device. Plans, votes and records are exchanged on the host in any case."""
T = TypeVar("T")


class Ranks(Alone):
    """G processes. Methods are collective calls, which all of them make in the same order."""

    def __init__(self, votes: RankConsensus) -> None:
        self._votes = votes
        self.rank, self.size = votes.rank, votes.size

    def on_all(self, what: str, work: Callable[[], T]) -> T:
        """Do this rank's part of the work, `what` in words. All ranks go on, or none.

        A rank that fails raises what went wrong there, the others `RankError`; or `DivergedError` where numbers are not
        finite on some, and nothing else is wrong.
        """
        error, done = None, None
        try:
            done = work()
        except Exception as raised:
            error = raised
        # asked on every rank, also on those that are well: a rank that raised at once would leave the others waiting
        objections = self._objections(_words(error), what)
        if not objections:
            return done  # type: ignore[return-value]  # without an error there is one
        # ranks can only survive a divergence together
        otherwise = self.max([int(error is not None and not isinstance(error, DivergedError))])[0]
        if error is not None and (otherwise == 0 or not isinstance(error, DivergedError)):
            raise error
        error_class = RankError if otherwise else DivergedError
        raise error_class(f"{what} failed on another rank: " + "; ".join(objections)) from error

    def require_same(self, facts: Mapping[str, Any], advice: str) -> None:
        """Raise `ConfigError` with this advice, on every rank alike, unless all know the same facts as rank 0."""
        what, sent = f"comparing {next(iter(facts))}", [dict(facts)]
        with collective_errors(what, self._votes.group):
            dist.broadcast_object_list(sent, group=self._votes.group, group_src=0)
        names = dict.fromkeys([*sent[0], *facts])
        here = [name for name in names if facts.get(name) != sent[0].get(name)]
        mine = ", ".join(f"{name} is {facts.get(name)!r}, {sent[0].get(name)!r} on rank 0" for name in here)
        if objections := self._objections(mine or None, what):
            raise ConfigError(f"ranks differ: {'; '.join(objections)}. {advice}")

    def max(self, numbers: ArrayLike) -> NDArray[np.int64]:
        return self._votes.most(torch.from_numpy(np.asarray(numbers, np.int64)), "agreeing on numbers").numpy()

    def sum(self, numbers: ArrayLike) -> NDArray[np.float64]:
        return self.all_gather(np.asarray(numbers, np.float64)).sum(axis=0)  # type: ignore[no-any-return]

    def all_gather(self, array: NDArray[Any]) -> NDArray[Any]:
        return self._votes.gather(torch.from_numpy(np.ascontiguousarray(array)), "gathering arrays").numpy()

    def gather(self, part: T) -> list[T]:
        parts: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with collective_errors("gathering records", self._votes.group):
            dist.gather_object(part, parts, group=self._votes.group, group_dst=0)
        return parts or []

    def _objections(self, mine: str | None, what: str) -> list[str]:
        """Return what is wrong on any rank, the same list on all of them, empty when all is well."""
        # one number first: texts are exchanged where there are some
        if not self._votes.most(torch.tensor([mine is not None], dtype=torch.int32), what).item():
            return []
        texts = enumerate(self._votes.texts(mine or "", what))
        return [f"rank {rank}: {text}" for rank, text in texts if text]


def _words(error: Exception | None) -> str | None:
    """Say on another rank what went wrong here; errors of ours need no name of a class."""
    if error is None:
        return None
    words = f"{type(error).__name__}: {error}"
    return str(error) or words if isinstance(error, ForerouteError) else words


def find_device(asked: str) -> torch.device:
    """Find the device of this process, for "cpu", "cuda" or "auto"; `ConfigError` where it is not there.

    "auto" is "cuda" where every process of the machine has a device of its own, so that all of them decide alike.
    """
    if asked == "cpu":
        return CPU
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rank, processes = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    if max(rank + 1, processes if asked == "auto" else 1) <= there:
        return torch.device("cuda", rank)
    if asked == "auto":
        return CPU
    raise ConfigError(
        f'device = "cuda" needs CUDA device {rank}, that of process {rank} of the machine, and torch '
        f'{torch.__version__} sees {there}; set device = "auto" or "cpu", start no more processes than there are '
        "devices, or install a torch for CUDA"
    )


def require_no_accelerator(device: torch.device) -> None:
    """Raise `ConfigError` where transformers, which takes the accelerator of a machine, would not take this device."""
    if device.type == "cpu" and torch.accelerator.is_available():
        raise ConfigError(
            "the run computes on the CPU, and transformers would spread the model over accelerators that it sees; set "
            'device = "cuda" and start no more processes than there are devices, or hide them: CUDA_VISIBLE_DEVICES=""'
        )


def num_started() -> int:
    """Read how many processes torchrun says that it started; 1 without it. Raises `ConfigError` for nonsense."""
    return _number("WORLD_SIZE", 1, "no number of processes", least=1)


@contextmanager
def join_ranks(num_ranks: int, timeout_s: float, device: torch.device = CPU) -> Iterator[Alone]:
    """Join the processes of this run, of torchrun or of a group that is there; they exchange tensors on `device`.

    Raises:
        ConfigError: when there are other than `num_ranks`.
        RankError: when they do not find each other within `timeout_s`.
        TransferError: in the place of what collectives of torch and transformers raise, when a process is gone.
    """
    started = dist.get_world_size() if dist.is_initialized() else num_started()
    if started != num_ranks:
        raise ConfigError(
            f"parallel.expert is {num_ranks} and {started} process{'es run' if started > 1 else ' runs'}; start one "
            f"for each rank: torchrun --nproc-per-node {num_ranks} -m foreroute.cli train CONFIG"
        )
    if num_ranks == 1:
        yield Alone()
        return
    require_no_accelerator(device)
    made_here = not dist.is_initialized()
    if made_here:
        try:
            dist.init_process_group(BACKENDS[device.type], timeout=timedelta(seconds=timeout_s))
        except (ValueError, RuntimeError) as error:
            raise RankError(
                f"the {num_ranks} processes of the run did not find each other: {error}. Start them with torchrun, and "
                "look for the error of one that ended"
            ) from error
    try:
        votes = RankConsensus(timeout_s=WORK_TIMEOUT_S)
        ranks = Ranks(votes)
        ranks.require_same({"device": device.type}, "Give each process a device of one kind")
        with collective_errors("running the policy", votes.group):
            yield ranks
    finally:
        if made_here:
            dist.destroy_process_group()


def _number(variable: str, default: int, otherwise: str = "no number", least: int = 0) -> int:
    said = os.environ.get(variable, str(default))
    if not (said.isascii() and said.isdecimal() and int(said) >= least):
        raise ConfigError(f"the environment has {variable}={said!r:.40}, {otherwise}; unset it, or use torchrun")
    return int(said)

"""Child processes of tests: worker processes in a gloo group, torchrun, and the environment of any other.

Workers are started once and fed with functions. Every wait has an end.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

START_S = 300
"""Importing torch takes seconds, and on a machine with more workers than cores, minutes."""
STOPPED_WITHIN_S = 40
"""torchrun gives its processes 30 s to end before it kills them."""
IMPORTED = (
    "torch.distributed",
    "torch._dynamo",
    "numba",
    "foreroute.adapters.hf",
    "foreroute.ep.transfer.engine",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
"""By the one process that all workers of a test run are forked from: what attaching to a tiny model imports, and
planning, which would take each of them a second."""
# multiprocessing has one too: processes that stand in for CUDA are forked from that
server = forkserver.ForkServer()
server.set_forkserver_preload(list(IMPORTED))
kept: dict[Any, Any] = {}
"""What functions keep in a worker for the rest of a call, such as process groups that are made once."""


@dataclass
class Raised:
    """An error of a worker, in the caller's process."""

    kind: str
    message: str
    trace: str


class Workers:
    """Processes in one group. `run` calls a module-level function as `function(rank, *args)` on all of them.

    Args:
        num_ranks: how many.
        timeout_s: a call that takes longer fails, and ends them all.
        backend: of the group.
        method: by which they are started; "spawn" where they use CUDA, which imports may have touched before a fork.
    """

    def __init__(
        self, num_ranks: int, *, timeout_s: float = 60, backend: str = "gloo", method: str = "forkserver"
    ) -> None:
        self.timeout_s = timeout_s
        context: Any = multiprocessing.get_context(method)
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, backend, rendezvous, there), daemon=True)
            with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
                process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)
        end = time.monotonic() + START_S
        for rank in range(num_ranks):
            self._receive(rank, end)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What every rank returns; an error of any rank fails the test with its traceback."""
        outcomes = self.outcomes(function, *args)
        failed = [f"rank {rank}:\n{o.trace}" for rank, o in enumerate(outcomes) if isinstance(o, Raised)]
        assert not failed, "\n".join(failed)
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What every rank returns or raises; None for a process that is gone."""
        self._send((function, args))
        end = time.monotonic() + self.timeout_s
        outcomes = [self._receive(rank, end) for rank in range(len(self._pipes))]
        # only now is no rank in need of a group that another gives up
        self._send((_clear, ()))
        return outcomes

    def _send(self, order: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send(order)

    def _receive(self, rank: int, end: float) -> Any:
        if not self._pipes[rank].poll(max(0.0, end - time.monotonic())):
            self.close()
            raise AssertionError(f"rank {rank} did not answer in time")
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return None

    def close(self) -> None:
        """End them all."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()


def torchrun(num_ranks: int, *arguments: object, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end, or stop all ranks: killing torchrun alone would leave them running.

    Args:
        num_ranks: processes on this machine.
        arguments: a script and its arguments, or "-m" and a module.
        timeout: seconds.
        options: of `subprocess.Popen`.

    Raises:
        subprocess.TimeoutExpired: after the ranks were told to stop.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    process = subprocess.Popen(
        [str(part) for part in (*command, *arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate(timeout=STOPPED_WITHIN_S)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, in which a child of this Python imports what this process can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}


def _serve(rank: int, num_ranks: int, backend: str, rendezvous: str, pipe: Connection) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # what is imported by now stays: without this, every full collection walks it all
    gc.freeze()
    store = dist.FileStore(rendezvous, num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group(backend, rank=rank, world_size=num_ranks, store=store, timeout=timedelta(seconds=START_S))
    pipe.send("ready")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        if function is _clear:
            _clear()
            continue
        try:
            answer = function(rank, *args)
        except Exception as error:
            answer = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(answer)
        del answer


def _clear() -> None:
    kept.clear()
    give_up_groups()
    gc.collect()


def give_up_groups(stay: Collection[Any] = ()) -> None:
    """Destroy all process groups but the first. Each has threads, of which one wakes a hundred times a second.

    Args:
        stay: groups that are not destroyed either.
    """
    import torch.distributed as dist

    world: Any = dist.distributed_c10d._world
    for group, name in list(world.pg_names.items()):
        if group in world.pg_map and group is not dist.group.WORLD and group not in stay:
            dist.destroy_process_group(group)
            # the store still has the addresses of a group of that name
            world.pg_names[f"gone: {name}"] = name

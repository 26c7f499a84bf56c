"""Child processes of tests: worker processes in a gloo group, torchrun, and the environment of any other.

Workers are started once and fed with functions. Every wait has an end.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

START_S = 300
"""Importing torch takes seconds, and on a machine with more workers than cores, minutes."""
AFTER_AN_ERROR_S = 1.0
"""Ranks that can go on without one that raised have answered by then; the others wait for it."""
STOPPED_WITHIN_S = 40
"""torchrun gives its processes 30 s to end before it kills them."""
IMPORTED = (
    "numpy.ma",
    "torch.distributed",
    "torch.distributed.tensor.debug",
    "torch._dynamo",
    "foreroute.adapters.hf.attaching",
    "foreroute.adapters.hf.expert_parallel",
    "foreroute.ep.transfer.engine",
    "pytest",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
"""By the one process that all workers of a test run are forked from: what attaching to a tiny model imports, and
executing a plan, which would take each of them a second."""
# multiprocessing has one too: processes that stand in for CUDA are forked from that
server = forkserver.ForkServer()
server.set_forkserver_preload(list(IMPORTED))
_GONE = object()
"""In the place of what a process that is gone would have answered."""
kept: dict[Any, Any] = {}
"""Values that functions keep in a worker for the rest of a call, such as process groups that are made once."""


@dataclass
class Raised:
    """An error of a worker, in the caller's process."""

    error: str
    message: str
    trace: str


class WorkersError(AssertionError):
    """A rank raised, died, or did not answer in time."""


class Workers:
    """Processes in one group. `run` calls a module-level function as `function(rank, *args)` on all of them.

    Args:
        num_ranks: how many.
        timeout_s: a call that takes longer fails, and ends them all.
        backend: of the group.
        forked_from: the process that they are forked from; one with what `IMPORTED` names by default. None starts them
            anew, for those that use CUDA, which imports may have touched before a fork.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        timeout_s: float = 60,
        backend: str = "gloo",
        forked_from: forkserver.ForkServer | None = server,
    ) -> None:
        self.timeout_s, self.is_closed = timeout_s, False
        context: Any = multiprocessing.get_context("spawn" if forked_from is None else "forkserver")
        source = server if forked_from is None else forked_from
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            arguments = rank, num_ranks, backend, self._folder.name, there
            process = context.Process(target=_serve, args=arguments, daemon=True)
            # that process imports before it is told this one's sys.path
            with (
                patch.dict(os.environ, environment()),
                patch.object(forkserver, "connect_to_new_process", source.connect_to_new_process),
            ):
                process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)
        self._answers(START_S, START_S)

    def run(self, function: Callable[..., Any], *args: Any, dying: Collection[int] = ()) -> list[Any]:
        """Return what every rank returns.

        Args:
            function: of a module that ranks can import.
            args: behind the rank.
            dying: ranks that end without an answer, as the function has them; None is theirs. The others end behind
                their answer, as processes that fail do, and their connections with them.

        Raises:
            WorkersError: with the traceback of every rank that raised, and what one that died printed last, without
                waiting for ranks that wait for these; or with the stacks of those that did not answer in time.
        """
        answers = self._call(function, args, AFTER_AN_ERROR_S, dying)
        if failed := self._failures(dict(enumerate(answers)), dying):
            raise WorkersError(failed)
        return [None if answer is _GONE else answer for answer in answers]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what every rank returns or raises; None for a process that is gone."""
        return [None if answer is _GONE else answer for answer in self._call(function, args, self.timeout_s)]

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], grace_s: float, dying: Collection[int] = ()
    ) -> list[Any]:
        self._send((function, args, bool(dying)))
        answers = self._answers(self.timeout_s, grace_s, dying)
        # only now is no rank in need of a group that another gives up
        self._send((_clear, (), False))
        return answers

    def _send(self, order: tuple[Callable[..., Any], tuple[Any, ...], bool]) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # of a process that is gone
                pipe.send(order)

    def _answers(self, within_s: float, grace_s: float, dying: Collection[int] = ()) -> list[Any]:
        """By rank. Once a rank has raised or died, the others have `grace_s` left."""
        end = time.monotonic() + within_s
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        answers: dict[int, Any] = {}
        while len(answers) < len(ranks):
            waiting = [pipe for pipe, rank in ranks.items() if rank not in answers]
            ready = connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                failed, stacks = self._failures(answers, dying), self._stacks(answers)
                self.close()
                raise WorkersError(failed + stacks)
            for pipe in waiting:
                if pipe in ready:
                    answer = answers[ranks[pipe]] = _received(pipe)
                    if isinstance(answer, Raised) or (answer is _GONE and ranks[pipe] not in dying):
                        end = min(end, time.monotonic() + grace_s)
        return [answers[rank] for rank in range(len(ranks))]

    def _failures(self, answers: dict[int, Any], dying: Collection[int]) -> str:
        """Collect what ranks raised, and what those printed last that died."""
        text, of = "", len(self._pipes)
        for rank, answer in answers.items():
            if isinstance(answer, Raised):
                text += f"rank {rank} of {of} raised\n{answer.trace}\n{self._log(rank)}\n"
            elif answer is _GONE and rank not in dying:
                text += f"rank {rank} of {of} died\n{self._log(rank)}\n"
        return text

    def _stacks(self, answers: dict[int, Any]) -> str:
        """Show where those hang that have not answered."""
        hanging = [rank for rank in range(len(self._pipes)) if rank not in answers]
        for rank in hanging:
            os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = "".join(f"rank {rank} hangs here:\n{self._log(rank)}\n" for rank in hanging)
        return f"ranks {hanging} of {len(self._pipes)} did not answer in time\n{stacks}"

    def _log(self, rank: int) -> str:
        """The end of what a rank printed."""
        return Path(self._folder.name, f"{rank}.log").read_text(errors="replace")[-6000:]

    def close(self) -> None:
        """End them all."""
        self.is_closed = True
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


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return _GONE


def _serve(rank: int, num_ranks: int, backend: str, folder: str, pipe: Connection) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    log = open(f"{folder}/{rank}.log", "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    torch.set_num_threads(1)
    # what is imported by now stays: without this, every full collection walks it all
    gc.freeze()
    store = dist.FileStore(f"{folder}/store", num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group(backend, rank=rank, world_size=num_ranks, store=store, timeout=timedelta(seconds=START_S))
    pipe.send("ready")
    while True:
        try:
            function, args, is_last = pipe.recv()
        except EOFError:
            return
        if function is _clear:
            _clear()
            continue
        try:
            answer = function(rank, *args)
        except BaseException as error:  # pytest's failures are no exceptions
            answer = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(answer)
        if is_last:
            return
        del answer


def _clear() -> None:
    kept.clear()
    leave_groups()
    gc.collect()


def leave_groups(stay: Collection[Any] = ()) -> None:
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
    if "torch.distributed.tensor" in sys.modules:  # what it keeps of operators is of meshes of these groups
        from torch.distributed.tensor import debug

        for name, clear in vars(debug).items():  # torch 2.10 has no function that clears both caches
            if name.startswith("_clear_") and name.endswith("_sharding_prop_cache"):
                clear()

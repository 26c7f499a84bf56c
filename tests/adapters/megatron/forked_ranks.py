"""Functions run on several ranks: forked from one process that has imported Megatron, joined by gloo.

Importing Megatron takes seconds and forking a process that has imported it takes milliseconds, so every call gets new
processes and nothing of one test is left over for the next.
"""

import ast
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path

import pytest

from tests.adapters.megatron.grid import MOST_RANKS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time."""


def run(function, *args, ranks=1, timeout=120, dying=()):
    """Call a function on `ranks` processes that form the default process group.

    Args:
        function: "module.name" of a module beside this one: it imports Megatron, and this process does not. What it
            returns is pickled.
        timeout: seconds, after which every rank's stack is reported.
        dying: ranks that end without an answer, as the function has them; the others then do not wait for each other.

    Returns:
        What each rank returned, by rank; None of one that died.

    Raises:
        RankError: with the traceback of the first rank that raised, or the stacks of those that hang.
    """
    assert ranks <= MOST_RANKS, f"{ranks} ranks were asked for; {MOST_RANKS} is the most that two cores carry"
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(
                target=_rank_main, args=(rank, ranks, folder, pipes[rank][1], function, args, dying), daemon=True
            )
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            return _collect([receiver for receiver, _ in pipes], processes, Path(folder), timeout, dying)
        finally:
            for process in processes:
                process.kill()
                process.join()


def checks_of(module, ranks=1):
    """One test for every function `check_…` of a module beside this one, which is read and not imported."""
    tree = ast.parse((HERE / f"{module}.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]
    assert names, f"{module} has no checks"

    @pytest.mark.parametrize("check", names)
    def test(check):
        run(f"{module}.{check}", ranks=ranks)

    return test


def _context():
    """Children are forked from a server that has imported what `preloaded` imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        # the server imports before it is told this process's sys.path
        for folder in (ROOT / "src", ROOT):
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def _collect(receivers, processes, folder, timeout, dying):
    deadline = time.monotonic() + timeout
    results = {}
    while len(results) < len(receivers):
        waiting = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in results}
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(_stacks(processes, folder, sorted(waiting.values()), timeout))
        for receiver in ready:
            rank = waiting[receiver]
            try:
                is_result, value = receiver.recv()
            except EOFError:
                if rank in dying:
                    results[rank] = None
                    continue
                raise RankError(f"rank {rank} of {len(receivers)} died\n{_log(folder, rank)}") from None
            if not is_result:
                raise RankError(f"rank {rank} of {len(receivers)} raised\n{value}\n{_log(folder, rank)}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _stacks(processes, folder, hanging, timeout):
    for rank in hanging:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    stacks = "\n".join(f"rank {rank} hangs here:\n{_log(folder, rank)}" for rank in hanging)
    return f"ranks {hanging} of {len(processes)} did not answer within {timeout} s\n{stacks}"


def _log(folder, rank):
    """The end of what a rank printed."""
    return (folder / f"rank{rank}.log").read_text(errors="replace")[-6000:]


def _rank_main(rank, ranks, folder, sender, function, args, dying):
    log = open(f"{folder}/rank{rank}.log", "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    try:
        sender.send((True, _with_group(rank, ranks, folder, function, args, dying)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        # leaves without the farewells of process groups, which wait for ranks that are gone
        os._exit(0)


def _with_group(rank, ranks, folder, function, args, dying):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1")
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600))
    module, name = function.split(".")
    result = getattr(importlib.import_module(f"{__package__}.{module}"), name)(*args)
    # a rank that has its result may leave only when the others no longer need it
    if not dying:
        dist.barrier()
    return result

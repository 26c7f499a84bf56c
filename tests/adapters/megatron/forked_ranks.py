"""Functions run on several ranks: forked from one process that has imported Megatron, joined by gloo.

Importing Megatron takes seconds and forking a process that has imported it takes milliseconds, so every call gets new
processes and nothing of one test is left over for the next.
"""

import importlib
import os
from multiprocessing import forkserver
from pathlib import Path

from foreroute.testing.ranks import Workers
from foreroute.testing.ranks import WorkersError as WorkersError

MOST_RANKS = 4
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
server = forkserver.ForkServer()
server.set_forkserver_preload([f"{__package__}.preloaded"])


def run(function, *args, ranks=1, timeout=120, dying=()):
    """Call "module.name" of a module beside this one, which may import Megatron, on ranks: see `Workers.run`."""
    assert ranks <= MOST_RANKS, f"{ranks} ranks were asked for; {MOST_RANKS} is the most that two cores carry"
    workers = Workers(ranks, timeout_s=timeout, forked_from=server)
    try:
        return workers.run(call, ranks, function, args, dying=dying)
    finally:
        workers.close()


def call(rank, ranks, function, args):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1")
    module, name = function.split(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*args)


def on_ranks(ranks):
    """Has a test run on so many ranks: `conftest` reads its module, and does not import it."""
    return lambda body: body

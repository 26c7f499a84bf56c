"""Functions on ranks of their own, in a group by gloo. Modules that stand in for CUDA are imported there alone."""

import importlib
import io
import multiprocessing
import os
import sys
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

from foreroute.testing.ranks import Workers

WITHIN_S = 1800


def run(num_ranks, function, *args):
    """What "module.function", of a module beside this one, returns on each rank."""
    with closing(Workers(num_ranks, timeout_s=WITHIN_S, forked_from=None)) as workers:
        answers = workers.run(_call, function, args)
    return [torch.load(io.BytesIO(answer), weights_only=False) for answer in answers]


def run_each(num_ranks, function, policy, runs, *args):
    """Of each run, by name, what its ranks did: lists of what `run` gives."""
    by_rank = run(num_ranks, function, policy, runs, *args)
    return {name: [rank[name] for rank in by_rank] for name in by_rank[0]}


def with_verl_of(patched, function, *args):
    """Call "module.function" where verl is imported from there, and nothing of foreroute.trainers."""
    sys.path.insert(0, str(patched))
    module, name = function.split(".")
    found = getattr(importlib.import_module(f"{__package__}.{module}"), name)(*args)
    assert Path(sys.modules["verl"].__file__).is_relative_to(patched)
    assert not [each for each in sys.modules if each.startswith("foreroute.trainers")]
    return found


def _call(rank, function, args):
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} | {name: str(value) for name, value in world.items()}
    multiprocessing.current_process()._config["daemon"] = False  # Megatron saves a checkpoint in a child
    module, name = function.split(".")
    answer = io.BytesIO()  # of bytes alone: a pipe would share the memory of each tensor by a file of its own
    torch.save(getattr(importlib.import_module(f"{__package__}.{module}"), name)(*args), answer)
    return answer.getvalue()

"""What the ranks run in the tests of the harness and of Megatron itself."""

import time

import megatron.core
import torch
import torch.distributed as dist

from tests.adapters.megatron import training_step
from tests.adapters.megatron.micro_batches import make_batches
from tests.adapters.megatron.model_chunks import build, initialize


def raises_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 did not like it")
    dist.barrier()


def hangs_on_rank_one():
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def sums_ranks():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total), dist.get_rank()


def leaves_marks():
    """Whether what a check may break was broken before, and is now: torch, Megatron, the process group."""
    before = broken()
    torch.Tensor.mark = megatron.core.mark = True
    dist.destroy_process_group()
    dist.barrier = lambda: None
    return before, broken()


def broken():
    return hasattr(torch.Tensor, "mark"), hasattr(megatron.core, "mark"), not dist.is_initialized()


def version():
    return megatron.core.__version__


def trains(cell):
    """One step of a cell as it is."""
    initialize(cell)
    return training_step.step(build(cell), make_batches(cell))[0]

"""Running a function on two ranks that talk over gloo."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_two_ranks(work, *args):
    """`work(rank, *args)` on each; returns what each gave back."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, work, args), nprocs=2)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


def _rank(rank, folder, work, args):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(work(rank, *args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()

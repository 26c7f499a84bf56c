"""`foreroute plan --measure`: what the ranks of this machine reach, into the topology file that plans are priced by."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from foreroute.cli.terminal import shown_facts, working
from foreroute.cli.train import console_of_rank
from foreroute.costs.cluster_file import load_cluster, with_rates, write_rates
from foreroute.ep.agreement import RankConsensus
from foreroute.train.policy import Alone
from foreroute.train.ranks import BACKENDS, WORK_TIMEOUT_S, Ranks, find_device, num_started
from foreroute.train.rates import measure_rates

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

TOKENS = 2048
"""Tokens of a rank in a micro-step, where nothing else is asked for."""


def measure(topology: Path, tokens: int | None) -> None:
    """Measure, print, and write into the file. In one process nothing is written: links and ranks are not there.

    Args:
        topology: a TOML file, of the ranks that torchrun started.
        tokens: of a rank in a micro-step; `TOKENS` by default.

    Raises:
        ConfigError: when the file cannot be read or written, or is of other ranks.
    """
    cluster, console, device = load_cluster(topology), console_of_rank(), find_device("auto")
    with _join_processes(device) as ranks:
        with working("measuring", console):
            rates = measure_rates(cluster, ranks, device, tokens or TOKENS)
        with_rates(topology, rates)  # on all ranks alike: what cannot be written ends them all
        console.print(shown_facts({f"{table}.{key}": f"{v:g}" for table, of in rates.items() for key, v in of.items()}))
        if ranks.size == 1:
            console.print("one process measures no links and no replicas; nothing was written", highlight=False)
        else:
            ranks.on_rank_0("writing the rates", lambda: write_rates(topology, rates))
            console.print(f"{'rates':<9} {topology}", soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _join_processes(device: torch.device) -> Iterator[Alone]:
    """The processes that torchrun started, or this one."""
    if (size := num_started()) > 1:
        dist.init_process_group(BACKENDS[device.type])
    else:
        dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield Ranks(RankConsensus(timeout_s=WORK_TIMEOUT_S)) if size > 1 else Alone()
    finally:
        dist.destroy_process_group()

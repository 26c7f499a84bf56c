"""`foreroute measure`: what the ranks of this machine reach, into the topology file that plans are priced by."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from foreroute.cli.terminal import shown_facts, working
from foreroute.cli.train import console_of_rank
from foreroute.costs.cluster_file import load_cluster, with_rates, write_rates
from foreroute.train.ranks import BACKENDS, WORK_TIMEOUT_S, find_device, join_ranks, num_started
from foreroute.train.rates import measure_rates


def run_measurement(topology: Path, tokens: int) -> None:
    """Measure with `tokens` of a rank in a micro-step, print, and write into the file; in one process print alone."""
    cluster, console, device = load_cluster(topology), console_of_rank(), find_device("auto")
    with ExitStack() as held:
        if (size := num_started()) == 1 and not dist.is_initialized():
            # collectives are timed, and need a group of one too
            dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
            held.callback(dist.destroy_process_group)
        ranks = held.enter_context(join_ranks(size, WORK_TIMEOUT_S, device))
        with working("measuring", console):
            rates = measure_rates(cluster, ranks, device, tokens)
        with_rates(topology, rates)  # on all ranks alike: what cannot be written ends them all
        console.print(shown_facts({f"{table}.{key}": f"{v:g}" for table, of in rates.items() for key, v in of.items()}))
        if ranks.size == 1:  # links and transfers between ranks are what plans are priced by
            console.print("one process measures no links and no replicas; nothing was written", highlight=False)
        else:
            ranks.on_rank_0("writing the rates", lambda: write_rates(topology, rates))
            console.print(f"{'rates':<9} {topology}", soft_wrap=True, highlight=False, markup=False)

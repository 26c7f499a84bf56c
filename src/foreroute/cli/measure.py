"""`foreroute measure`: what the ranks of this machine reach, into the topology file that plans are priced by."""

from __future__ import annotations

from pathlib import Path

from foreroute.cli.terminal import shown_facts, working
from foreroute.cli.train import console_of_rank
from foreroute.costs.cluster_file import load_cluster, with_rates, write_rates
from foreroute.errors import ConfigError
from foreroute.train.ranks import WORK_TIMEOUT_S, find_device, join_ranks, num_started
from foreroute.train.rates import measure_rates


def run_measurement(topology: Path, tokens: int) -> None:
    """Measure with `tokens` of a rank in a micro-step, print, and write into the file."""
    cluster, console, device = load_cluster(topology), console_of_rank(), find_device("auto")
    if (size := num_started()) == 1:
        raise ConfigError(
            "measure times the ranks of a run, and 1 process runs; start several: "
            f"torchrun --nproc-per-node {cluster.topology.num_ranks} -m foreroute.cli measure {topology}"
        )
    with join_ranks(size, WORK_TIMEOUT_S, device) as ranks:
        with working("measuring", console):
            rates = measure_rates(cluster, ranks, device, tokens)
        with_rates(topology, rates)  # on all ranks alike: what cannot be written ends them all
        console.print(shown_facts({f"{table}.{key}": f"{v:g}" for table, of in rates.items() for key, v in of.items()}))
        ranks.on_rank_0("writing the rates", lambda: write_rates(topology, rates))
        console.print(f"{'rates':<9} {topology}", soft_wrap=True, highlight=False, markup=False)

"""Links, measured: what all ranks agree on, and what a slow one does to it."""

import time
from dataclasses import astuple
from unittest import mock

import pytest
import torch

from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.link_rates import LARGE_BYTES, measure_links
from foreroute.ep.transfer.peers import Exchange, PeerGroup

DELAY_S = 0.2


def measured(rank, ranks_per_node, slow_rank=None):
    peers, wait = PeerGroup(timeout_s=20), Exchange.wait

    def delayed(self):
        time.sleep(DELAY_S if rank == slow_rank else 0)
        wait(self)

    with mock.patch.object(Exchange, "wait", delayed):
        return measure_links(peers, RankConsensus(timeout_s=20), ranks_per_node, torch.device("cpu"))


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_all_ranks_have_the_same_links(workers, ranks_per_node):
    found = workers(4).run(measured, ranks_per_node)
    assert len(set(found)) == 1
    assert all(value > 0 for value in astuple(found[0]))


def test_the_slowest_rank_counts(workers):
    for links in workers(2).run(measured, 2, 1):
        assert links.node_latency_s >= DELAY_S
        assert links.node_bytes_per_s <= LARGE_BYTES / DELAY_S
        assert links.host_bytes_per_s > LARGE_BYTES / DELAY_S

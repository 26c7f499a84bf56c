"""Nodes of one machine are apart: links are as slow as they say, and memory is shared within a node alone."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.node_lab import NodeLab, carried_bytes, reason_against

pytestmark = pytest.mark.exhaustive
BYTES_PER_S, MESSAGE = 20e6, 20_000_000


@pytest.fixture(scope="module")
def found():
    if reason := reason_against():
        pytest.skip(reason)
    with NodeLab(2, BYTES_PER_S) as lab:
        return lab.run(across, ranks_per_node=2)


def across(rank, num_ranks):
    """Rank 0 sends to a neighbour on its node and to rank 2 on the other; who sees a file of its shared memory."""
    tensor, seconds, sent = torch.zeros(MESSAGE, dtype=torch.uint8), {}, {}
    for receiver in (1, 2):
        dist.barrier()
        before, begun = carried_bytes()[0], time.perf_counter()
        if rank == 0:
            dist.send(tensor, receiver)
        elif rank == receiver:
            dist.recv(tensor, 0)
        dist.barrier()
        seconds[receiver], sent[receiver] = time.perf_counter() - begun, carried_bytes()[0] - before
    mark = Path("/dev/shm/of-the-first-rank")
    if rank == 0:
        mark.touch()
    dist.barrier()
    seen = [torch.zeros(1) for _ in range(num_ranks)]
    dist.all_gather(seen, torch.tensor([float(mark.exists())]))
    return seconds, sent, [bool(one) for one in seen]


def test_a_link_carries_what_it_says_and_no_more(found):
    seconds, sent, _ = found
    bucket_s = 0.05  # what a full bucket lets through at once, and waking up
    assert MESSAGE / BYTES_PER_S - bucket_s < seconds[2]
    # acknowledgements and headers; a busy machine is slower, not faster
    assert MESSAGE <= sent[2] < 1.1 * MESSAGE


def test_within_a_node_nothing_crosses_the_link(found):
    seconds, sent, _ = found
    assert seconds[1] < MESSAGE / BYTES_PER_S / 2
    assert sent[1] < 0.01 * MESSAGE


def test_memory_is_shared_within_a_node_alone(found):
    assert found[2] == [True, True, False, False]


def failing(rank, num_ranks):
    if rank == 1:
        raise ValueError("rank 1 fails here")
    dist.barrier()


def test_a_rank_that_fails_ends_the_others_and_says_why():
    if reason := reason_against():
        pytest.skip(reason)
    with NodeLab(2, BYTES_PER_S) as lab, pytest.raises(RuntimeError, match="rank 1 fails here"):
        lab.run(failing, ranks_per_node=1)

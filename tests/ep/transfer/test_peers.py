"""Messages once posted arrive, whatever becomes of who posted them; questions without an answer end."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.peers import collective_errors
from foreroute.ep.transfer.transfers import Transfer
from tests.ep.executor_properties import said_by
from tests.ep.transfer.toy import peers

WAITED_S = 0.5


def one_rank_gives_up(rank):
    group, other = peers(), 1 - rank
    arrived = torch.zeros(2, 3)
    if rank == 0:
        time.sleep(WAITED_S)  # until the other rank has posted, failed and let go
    sent = [torch.full((3,), 10.0 * rank + i) for i in range(2)]
    transfers = [
        Transfer(group, f"transfer {i}", [(other, 0, sent[i])], [(other, 0, arrived[i])]).post() for i in range(2)
    ]
    del sent
    if rank == 0:
        for transfer in transfers:
            transfer.wait()
        assert arrived.tolist() == [[10.0] * 3, [11.0] * 3]
    transfers.clear()


@pytest.mark.slow
def test_what_was_posted_is_sent_although_its_sender_lets_go_of_it(workers):
    workers(2).run(one_rank_gives_up)


def test_an_error_that_no_lost_rank_has_caused_keeps_its_own_message():
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out"), collective_errors("gathering", None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def ask_alone(rank):
    consensus = RankConsensus(timeout_s=20)
    # a group that is made with so short a timeout may not come about on a busy machine
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=WAITED_S), consensus.group)
    told = said_by(consensus.most, torch.zeros(1), "asking") if rank else ""
    dist.barrier()
    return told


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_says_for_how_long(workers):
    said = workers(2).run(ask_alone)[1]
    waited = re.match(r"TransferError: asking: rank 1 got no answer from another rank after (\d+\.\d) s", said)
    assert waited is not None, said
    assert WAITED_S <= float(waited[1]) < 20

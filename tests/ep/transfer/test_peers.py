"""Messages once posted arrive, whatever becomes of who posted them; questions without an answer end."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.transfers import Transfer
from foreroute.errors import TransferError
from tests.ep.transfer.toy import peers

LATE_S = 0.5
"""Long enough that the other rank has posted, failed and let go before this one asks for its messages."""


def one_rank_gives_up(rank):
    group, other = peers(), 1 - rank
    arrived = torch.zeros(2, 3)
    if rank == 0:
        time.sleep(LATE_S)
    sent = [torch.full((3,), 10.0 * rank + i) for i in range(2)]
    transfers = [
        Transfer(group, f"transfer {i}", [(other, 0, sent[i])], [(other, 0, arrived[i])]).post() for i in range(2)
    ]
    del sent
    if rank == 0:
        for transfer in transfers:
            transfer.wait()
        return arrived.tolist()
    transfers.clear()
    return None


def test_what_was_posted_is_sent_although_its_sender_lets_go_of_it(workers):
    arrived, _ = workers(2).run(one_rank_gives_up)
    assert arrived == [[10.0] * 3, [11.0] * 3]


WAITED_S = 0.5
QUESTIONS = {
    "most": lambda consensus: consensus.most(torch.zeros(1), "asking"),
    "gather": lambda consensus: consensus.gather(torch.zeros(1), "asking"),
    "from_first": lambda consensus: consensus.from_first(b"", "asking"),
    "agree": lambda consensus: agreeing(consensus),
}


def agreeing(consensus):
    with consensus.agree("asking", TransferError):
        pass


def ask_alone(rank):
    """What rank 1 is told when rank 0 answers none of its questions."""
    groups = {name: RankConsensus(timeout_s=20) for name in QUESTIONS}
    told = {}
    for name, consensus in groups.items() if rank else ():
        # a group that is made with so short a timeout may not come about on a busy machine
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=WAITED_S), consensus.group)
        try:
            QUESTIONS[name](consensus)
        except TransferError as error:
            told[name] = str(error)
    dist.barrier()
    return told


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_says_for_how_long(workers):
    told = workers(2).run(ask_alone)[1]
    assert told.keys() == QUESTIONS.keys()
    for question, said in told.items():
        waited = re.match(r"asking: rank 1 got no answer from another rank after (\d+\.\d) s", said)
        assert waited is not None, (question, said)
        assert WAITED_S <= float(waited[1]) < 20

"""Questions that a rank does not answer end on the others, who say for how long they waited."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.errors import TransferError
from tests.tiers import grid

WAITED_S = 0.5
QUESTIONS = {
    "objections": lambda consensus: consensus.objections(None, "asking"),
    "most": lambda consensus: consensus.most(torch.zeros(1), "asking"),
    "gather": lambda consensus: consensus.gather(torch.zeros(1), "asking"),
    "from_first": lambda consensus: consensus.from_first(None, "asking"),
}


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


@pytest.fixture(scope="module")
def told(workers):
    return workers(2).run(ask_alone)[1]


@grid("question", QUESTIONS, quick=1)
def test_a_rank_that_waits_in_vain_says_for_how_long(told, question):
    waited = re.match(r"asking: rank 1 waited (\d+\.\d) s for another rank in vain", told[question])
    assert waited is not None, told[question]
    assert WAITED_S <= float(waited[1]) < 20

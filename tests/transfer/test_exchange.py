"""Messages once posted arrive, whatever becomes of who posted them."""

import time

import torch

from foreroute.transfer.exchange import Message
from toy import peers

LATE_S = 0.5
"""Long enough that the other rank has posted, failed and let go before this one asks for its messages."""


def one_rank_gives_up(rank):
    group, other = peers(), 1 - rank
    arrived = torch.zeros(2, 3)
    if rank == 0:
        time.sleep(LATE_S)
    exchanges = [
        group.begin(
            [Message(other, 0, torch.full((3,), 10.0 * rank + i))], [Message(other, 0, arrived[i])], f"exchange {i}"
        )
        for i in range(2)
    ]
    if rank == 0:
        for exchange in exchanges:
            exchange.wait()
        return arrived.tolist()
    exchanges.clear()
    return None


def test_what_was_posted_is_sent_although_its_sender_lets_go_of_it(workers):
    arrived, _ = workers(2).run(one_rank_gives_up)
    assert arrived == [[10.0] * 3, [11.0] * 3]

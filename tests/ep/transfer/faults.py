"""A direct path on which things go wrong as ordered."""

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass

from foreroute.ep.transfer.peers import Exchange, Message, PeerGroup
from foreroute.ep.transfer.slots import TransferBatch


@dataclass
class Fault:
    """What goes wrong, where and how often.

    Attributes:
        kind: "slow sender", "slow receiver", "corrupt", "killed" or "raises".
        rank: that it happens to.
        what: exchanges whose description contains this.
        times: that it happens.
        seconds: of delay.
    """

    kind: str
    rank: int
    what: str
    times: int = 1
    seconds: float = 0.0


class FaultyPeers(PeerGroup):
    fault: Fault | None = None
    happened = 0

    def begin(self, sends, receives, what):
        fault = self.fault
        sends = list(sends)
        if fault is None or self.rank != fault.rank or fault.what not in what or self.happened >= fault.times:
            return super().begin(sends, receives, what)
        if fault.kind == "corrupt" and not sends:
            return super().begin(sends, receives, what)
        self.happened += 1
        if fault.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "raises":
            raise ValueError("out of memory, say")
        if fault.kind == "slow sender":
            time.sleep(fault.seconds)
        if fault.kind == "corrupt":
            sends[0] = _corrupted(sends[0])
        exchange = super().begin(sends, receives, what)
        if fault.kind == "slow receiver":
            return _Slow(**vars(exchange), seconds=fault.seconds)
        return exchange


@dataclass
class _Slow(Exchange):
    seconds: float = 0.0

    def wait(self):
        time.sleep(self.seconds)
        super().wait()


def _corrupted(message):
    tensor = message.tensor.clone()
    tensor.view(-1)[0] += 1
    return Message(message.peer, message.number, tensor)


@contextmanager
def late_nowhere_else(fault):
    """Deadlines hold for the transfers of the fault alone: a busy machine may be late with any of them."""
    wait = TransferBatch.wait
    TransferBatch.wait = lambda batch, seconds: wait(batch, seconds if fault and fault.what in batch.what else 20.0)
    try:
        yield
    finally:
        TransferBatch.wait = wait

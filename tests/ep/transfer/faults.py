"""A direct path on which things go wrong as ordered."""

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foreroute.ep.transfer.peers import Exchange, Message, PeerGroup
from foreroute.ep.transfer.slots import TransferBatch

AT_MOST_S = 30.0
"""What any wait may take on a busy machine."""


@dataclass
class Fault:
    """What goes wrong, where and how often.

    Attributes:
        kind: "slow sender", "slow receiver", "corrupt", "killed" or "raises".
        rank: that it happens to.
        what: exchanges whose description contains this.
        times: that it happens.
        given_up: a file that is made when a rank no longer waits for what is late; the delay ends then.
    """

    kind: str
    rank: int
    what: str
    times: int = 1
    given_up: Path | None = None

    def delay(self):
        end = time.monotonic() + AT_MOST_S
        while not self.given_up.exists():
            assert time.monotonic() < end, f"everyone still waits for {self.what}"
            time.sleep(0.005)


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
            fault.delay()
        if fault.kind == "corrupt":
            sends[0] = _corrupted(sends[0])
        exchange = super().begin(sends, receives, what)
        if fault.kind == "slow receiver":
            return _Slow(**vars(exchange), fault=fault)
        return exchange


@dataclass
class _Slow(Exchange):
    fault: Fault | None = None

    def wait(self):
        self.fault.delay()
        super().wait()


def _corrupted(message):
    tensor = message.tensor.clone()
    tensor.view(-1)[0] += 1
    return Message(message.peer, message.number, tensor)


@contextmanager
def late_nowhere_else(fault):
    """Deadlines hold for the transfers of the fault alone: a busy machine may be late with any of them."""
    wait = TransferBatch.wait

    def waited(batch, seconds):
        if fault is None or fault.given_up is None or fault.what not in batch.what:
            return wait(batch, AT_MOST_S)
        objection = wait(batch, seconds)
        if objection is not None:
            fault.given_up.touch()
        return objection

    TransferBatch.wait = waited
    try:
        yield
    finally:
        TransferBatch.wait = wait

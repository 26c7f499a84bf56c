"""A direct path on which things go wrong as ordered."""

import os
import signal
import time
from dataclasses import dataclass

from foreroute.ep.transfer.peers import Exchange, Message, PeerGroup

LATE_S = 0.3
"""By so much is late what is slow."""


@dataclass
class Fault:
    """What goes wrong, where and how often.

    Attributes:
        kind: "slow sender", "slow receiver", "corrupt", "killed" or "raises".
        rank: that it happens to.
        what: exchanges whose description contains this.
        times: that it happens.
    """

    kind: str
    rank: int
    what: str
    times: int = 1


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
            time.sleep(LATE_S)
        if fault.kind == "corrupt":
            sends[0] = _corrupted(sends[0])
        exchange = super().begin(sends, receives, what)
        if fault.kind == "slow receiver":
            return _Slow(**vars(exchange))
        return exchange


class _Slow(Exchange):
    def wait(self):
        time.sleep(LATE_S)
        super().wait()


def _corrupted(message):
    tensor = message.tensor.clone()
    tensor.view(-1)[0] += 1
    return Message(message.peer, message.number, tensor)

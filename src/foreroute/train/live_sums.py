"""How far a policy's own routes have moved from the replayed ones, by mini-step, as sums that ranks add up."""

from __future__ import annotations

import numpy as np

from foreroute.mismatch import RoutingMismatch
from foreroute.train.ranks import Ranks


class LiveSums:
    """Adds up the replayed forwards of one rank in one update."""

    def __init__(self) -> None:
        self._ended: list[tuple[int, int]] = []
        self._now = (0, 0)

    def add(self, live: RoutingMismatch) -> None:
        """Add one forward: the live selection against the replayed one."""
        differing, cells = int(live.differing_L.sum()), live.rows * len(live.differing_L)
        self._now = (self._now[0] + differing, self._now[1] + cells)

    def end_mini_step(self) -> None:
        """What follows runs on other weights."""
        self._ended.append(self._now)
        self._now = (0, 0)

    def shares(self, ranks: Ranks) -> tuple[float, ...]:
        """Share of (token, layer) that agree, of all ranks, for each mini-step in which something was replayed.

        A collective call.
        """
        each_M2 = ranks.total(np.array(self._ended, np.float64).reshape(-1, 2))
        return tuple(float(1 - differing / cells) for differing, cells in each_M2 if cells)

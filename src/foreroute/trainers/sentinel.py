"""The sentinel of a trainer: rows are counted in the passes that have the weights of their rollout, and judged once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foreroute.mismatch import Sentinel, Suspicion
from foreroute.replay import RootRows, RoutedModel

Watching = Literal["off", "warn", "drop", "stop"]
"""What is done about rows that look wrong: nothing, a line in the log, their tokens leave the loss, the run ends."""


class RolloutSentinel:
    """Judges the rollouts of this process. Nothing waits for the device before `judge`."""

    def __init__(self, routed: RoutedModel) -> None:
        self._routed = routed
        self._sentinel = Sentinel(routed.spec)
        # of each rollout that is not judged yet: its counts, and sequences and lengths in the order of the passes
        self._rollouts: list[tuple[RootRows, list[NDArray[np.int64]], list[NDArray[np.int64]]]] = []

    def begin_rollout(self) -> None:
        """Count what follows as another rollout."""
        self._rollouts.append((RootRows(), [], []))

    def counting(self, sequences: NDArray[np.int64], lengths: NDArray[np.int64]) -> AbstractContextManager[None]:
        """Count a pass over sequences of the last rollout, with traces of these lengths, while the context is open."""
        rows, *seen = self._rollouts[-1]
        for before, more in zip(seen, (sequences, lengths), strict=True):
            before.append(more)
        return self._routed.listening(rows)

    def judge(self) -> list[Suspicion]:
        """Judge the rollouts that were counted since the last call. The host waits once for each of them."""
        found, self._rollouts, counted = [], [], self._rollouts
        for rows, sequences, lengths in counted:
            if sequences:
                order = np.argsort(np.concatenate(sequences), kind="stable")
                found += self._sentinel.judge(rows.read(np.concatenate(lengths)).in_order(order))
        return found

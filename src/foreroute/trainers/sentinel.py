"""The sentinel of a trainer: rows are counted in the passes that have the weights of their rollout, and judged once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foreroute.mismatch import Sentinel, Suspicion
from foreroute.replay import RootRows, RoutedModel

LOG = logging.getLogger(__name__)
Watching = Literal["off", "warn", "drop", "stop"]
"""Reaction to wrong rows: nothing, a line in the log, `kept_tokens` alone are trained on, the run ends."""


MOST_WAITING = 16
"""Rollouts whose counts stay on the device, 24 bytes a row: a warning is of no use much later."""


def kept_tokens(found: Sequence[Suspicion], lengths_S: NDArray[np.integer]) -> NDArray[np.int64]:
    """Count the tokens of S sequences, from the first of each, that stay in the loss where wrong rows are dropped.

    The row of a token routed what the next one was drawn from, and all behind it saw that. No token stays where all
    rows are suspected, or those of a layer.
    """
    kept_S = lengths_S.astype(np.int64)
    for each in found:
        if each.sequence is None or each.since is None:
            kept_S[:] = 0
        else:
            kept_S[each.sequence] = min(kept_S[each.sequence], each.since + 1)
    return kept_S


class RolloutSentinel:
    """Judges the rollouts of this process, or of the ranks that share a model. Nothing waits before `judge`.

    `sum_over_ranks` is that of `RootRows`; one rank that `says` what was found is enough.
    """

    def __init__(
        self, routed: RoutedModel, sum_over_ranks: Callable[[Tensor], Tensor] | None = None, *, says: bool = True
    ) -> None:
        self._routed, self._sum, self._says = routed, sum_over_ranks, says
        self._sentinel = Sentinel(routed.spec)
        # of each rollout that is not judged yet: its counts, and sequences and lengths in the order of the passes
        self._rollouts: list[tuple[RootRows, list[NDArray[np.int64]], list[NDArray[np.int64]]]] = []
        self._found: list[Suspicion] = []  # in rollouts that were judged without being asked for

    def begin_rollout(self) -> None:
        """Count what follows as another rollout; judge those before where many wait, whose rows stay on the device."""
        if len(self._rollouts) == MOST_WAITING:
            self._found = self.judge()
        self._rollouts.append((RootRows(self._routed, self._sum), [], []))

    def counting(
        self, lengths: NDArray[np.int64], sequences: NDArray[np.int64] | None = None
    ) -> AbstractContextManager[None]:
        """Count a pass over sequences of the last rollout, by default the next ones, while the context is open."""
        rows, seen, of_traces = self._rollouts[-1]
        seen.append(sum(map(len, seen)) + np.arange(len(lengths)) if sequences is None else sequences)
        of_traces.append(lengths)
        return self._routed.listening(rows)

    def judge(self) -> list[Suspicion]:
        """Judge the rollouts that were counted since the last call, with a line in the log. Waits once for each.

        A collective call of the ranks that share a model.
        """
        before, self._found = self._found, []
        found: list[Suspicion] = []
        counted, self._rollouts = self._rollouts, []
        for rows, sequences, lengths in counted:
            if sequences:
                order = np.argsort(np.concatenate(sequences), kind="stable")
                found += self._sentinel.judge(rows.read(np.concatenate(lengths)).in_order(order))
        if found and self._says:
            others = f", and {len(found) - 1} more" if len(found) > 1 else ""
            LOG.warning("The sentinel: %s%s. %s", found[0].sentence, others, found[0].looks_like.advice)
        return before + found

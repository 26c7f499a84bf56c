"""Mismatch of trainer and rollout, as sums until a trainer logs: ratios of sums are right over batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.mismatch import RoutingMismatch, routing_mismatch, token_mismatch
from foreroute.mismatch.measures import THRESHOLDS
from foreroute.trace import RoutingTrace

METRICS = {
    # what is logged: the two sums that it is the ratio of
    "mismatch/k3": ("k3", "tokens"),
    "mismatch/f2": ("above_2", "tokens"),
    "mismatch/disagreement": ("differing_cells", "cells"),
    "mismatch/disagreement_tokens": ("differing_rows", "rows"),
    "mismatch/native_disagreement": ("native_differing_cells", "native_cells"),
}
"""Logged beside a trainer's own, where there was something to compare.

- k3: mean of r - 1 - log r over sampled tokens, r the ratio of the trainer's to the rollout's probability; in nats.
- f2: share of sampled tokens with max(r, 1 / r) > 2.
- disagreement: share of (token, layer) that the trainer computed by other experts than the rollout.
- disagreement_tokens: share of tokens with at least one such layer.
- native_disagreement: share of (token, layer) in update passes whose router, left alone, would not pick the replayed
  experts.
"""
NAMES = tuple(dict.fromkeys(name for pair in METRICS.values() for name in pair))


class MismatchSums:
    """Sums of this process, and those of all processes that are not logged yet."""

    def __init__(self) -> None:
        self._mine = dict.fromkeys(NAMES, 0.0)
        self._all = dict.fromkeys(NAMES, 0.0)

    def compare_tokens(
        self,
        sampled: Sequence[NDArray[np.float32]],
        trained: Sequence[NDArray[np.float32]],
        counted: Sequence[NDArray[np.bool_]],
    ) -> NDArray[np.float64]:
        """Add probabilities of sampled tokens.

        Args:
            sampled: S arrays [R], log-probs that the rollout sampled with, NaN where not known.
            trained: S arrays [R], the trainer's.
            counted: S arrays [R], True for tokens that were sampled and are trained on.

        Returns:
            log_r_C: float64 [C], trainer's less rollout's, of those that count and are known.
        """
        by_rollout, by_trainer = np.concatenate(sampled), np.concatenate(trained)
        known = np.concatenate(counted) & ~np.isnan(by_rollout)
        tokens = token_mismatch(by_trainer[known], by_rollout[known])
        above = tokens.above[THRESHOLDS.index(2.0)]
        self._add(tokens=tokens.count, k3=tokens.k3_sum, above_2=above)
        return by_trainer[known].astype(np.float64) - by_rollout[known]

    def compare_routes(self, rollout: RoutingTrace, executed: RoutingTrace) -> None:
        """Routes of the rollout beside those that the trainer executed, whose sequences may end earlier."""
        routes = routing_mismatch(rollout.truncated(executed.lengths), executed)
        self._add(
            rows=routes.rows,
            differing_rows=int(routes.by_differing_layers[1:].sum()),
            cells=_cells(routes),
            differing_cells=int(routes.differing_L.sum()),
        )

    def add_native(self, *routes: RoutingMismatch) -> None:
        """Routes that the trainer would have taken by itself, beside those that were replayed."""
        for each in routes:
            self._add(native_cells=_cells(each), native_differing_cells=int(each.differing_L.sum()))

    def share_native(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Add up what `add_native` was given over ranks that share rows and layers. A collective call of them."""
        names = METRICS["mismatch/native_disagreement"]
        sums = reduce(torch.tensor([self._mine[name] for name in names], dtype=torch.float64)).cpu()
        self._mine |= dict(zip(names, sums.tolist(), strict=True))

    def share(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Add up the sums of all processes since the last call. A collective: every process calls it.

        Args:
            reduce: a tensor float64 [...] of the CPU in, the sum over all processes out.
        """
        sums = reduce(torch.tensor(list(self._mine.values()), dtype=torch.float64)).cpu()
        for name, value in zip(NAMES, sums.tolist(), strict=True):
            self._all[name] += value
        self._mine = dict.fromkeys(NAMES, 0.0)

    def flush(self) -> dict[str, float]:
        """What is to be logged, by name. Starts anew."""
        sums, self._all = self._all, dict.fromkeys(NAMES, 0.0)
        return {name: sums[above] / sums[below] for name, (above, below) in METRICS.items() if sums[below]}

    def _add(self, **values: float) -> None:
        for name, value in values.items():
            self._mine[name] += value


def _cells(routes: RoutingMismatch) -> int:
    return int(routes.rows * np.size(routes.differing_L))

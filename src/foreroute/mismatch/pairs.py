"""Two traces of the same tokens, laid side by side for a detective: agreement of any rows under any supposed mix-up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.trace import RoutingTrace

MAX_SAMPLED_ROWS = 1024


@dataclass(frozen=True)
class TracePair:
    """Traces `a` and `b` of the same tokens; a supposed mix-up says which row of `a` each row of `b` truly is.

    Agreement is the share of common picks above chance: 1 for equal sets, 0 on average for unrelated ones.
    """

    a: RoutingTrace
    b: RoutingTrace
    rng: np.random.Generator

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Up to 1,024 rows that `b` routed, ascending."""
        routed = np.flatnonzero(self.b.valid_N)
        if len(routed) <= MAX_SAMPLED_ROWS:
            return routed
        return np.sort(self.rng.choice(routed, MAX_SAMPLED_ROWS, replace=False))

    @cached_property
    def before(self) -> float:
        """Agreement as the traces are, over the targets; a target that `a` did not route counts 0."""
        return self.total(np.arange(self.a.num_rows))

    @cached_property
    def num_routers(self) -> int:
        """Sampled rows times layers."""
        return len(self.targets) * self.a.spec.num_layers

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """int64 [N], the position of each row in its sequence."""
        return np.arange(self.a.num_rows) - np.repeat(self.a.offsets[:-1], self.a.lengths)

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """int64 [N], the sequence of each row."""
        return np.repeat(np.arange(len(self.a)), self.a.lengths)

    def total(self, source_N: NDArray[np.int64]) -> float:
        """Mean agreement over the targets if row n of `b` were row `source_N[n]` of `a`; 0 where -1 or absent."""
        source, covered = self._covered(source_N[self.targets])
        if not covered.any():
            return 0.0
        agreed = self.agreement(source[covered], self.targets[covered])
        return float(agreed.sum() / self.num_routers)

    def covered_mean(self, source_N: NDArray[np.int64]) -> float:
        """Mean agreement over the targets that have a source."""
        source, covered = self._covered(source_N[self.targets])
        return float(self.agreement(source[covered], self.targets[covered]).mean()) if covered.any() else 0.0

    def agreement(
        self, rows_a: NDArray[np.int64], rows_b: NDArray[np.int64], layers: slice | NDArray[np.int64] = slice(None)
    ) -> NDArray[np.float64]:
        """[R, layers], agreement of row `rows_a[r]` of `a` with row `rows_b[r]` of `b`."""
        return self.above_chance(
            common_picks(self.a.expert_ids_NLK[rows_a][:, layers], self.b.expert_ids_NLK[rows_b][:, layers])
        )

    def above_chance(self, shared: NDArray[Any]) -> NDArray[np.float64]:
        """Counts of shared picks as agreement."""
        chance = self.a.spec.top_k / self.a.spec.num_experts
        return np.asarray((shared / self.a.spec.top_k - chance) / (1 - chance), np.float64)

    def _covered(self, source: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return source, (source >= 0) & self.a.valid_N[source]


def common_picks(ids_a: NDArray[Any], ids_b: NDArray[Any]) -> NDArray[np.int64]:
    """[...], picks of `ids_a` [..., K] that are also in `ids_b` [..., K]."""
    shared = np.zeros(ids_a.shape[:-1], np.int64)
    for k in range(ids_a.shape[-1]):
        shared += (ids_b == ids_a[..., k : k + 1]).any(axis=-1)
    return shared


def set_masks(ids: NDArray[Any], num_experts: int) -> NDArray[np.uint64]:
    """Sets of picks [..., K] as bits, uint64 [..., words of 64 experts]; `a & b` then holds the common picks."""
    word, bit = ids >> 6, np.uint64(1) << (ids & 63).astype(np.uint64)
    masks = np.zeros((*ids.shape[:-1], -(-num_experts // 64)), np.uint64)
    for w in range(masks.shape[-1]):
        masks[..., w] = np.bitwise_or.reduce(np.where(word == w, bit, np.uint64(0)), axis=-1)
    return masks

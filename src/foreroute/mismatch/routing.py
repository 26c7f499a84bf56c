"""Mismatch of routes, kept as counts so that parts of a batch, or ranks, can be added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.trace import RoutingTrace, overlap


@dataclass(frozen=True, eq=False)
class RoutingMismatch:
    """Counts over the rows that both sides routed, prompt included. Experts are compared as sets.

    Attributes:
        rows: number of token rows compared.
        top_k: K.
        differing_L: int64 [L], rows whose expert set differs, per layer.
        shared_L: int64 [L], experts picked by both, summed over rows.
        by_differing_layers: int64 [L + 1], rows by their number of differing layers.
        first_differing_L: int64 [L], rows by the first layer that differs.
    """

    rows: int
    top_k: int
    differing_L: NDArray[np.int64]
    shared_L: NDArray[np.int64]
    by_differing_layers: NDArray[np.int64]
    first_differing_L: NDArray[np.int64]

    @property
    def differing_share(self) -> float:
        """Share of (token, layer) whose expert sets differ. Source: arXiv 2510.11370, section 3.2, router level."""
        return float(self.differing_L.sum() / max(self.rows * len(self.differing_L), 1))

    @property
    def differing_tokens_share(self) -> float:
        """Share of tokens with at least one differing layer. Source: arXiv 2510.11370, section 3.2, token level."""
        return float(self.by_differing_layers[1:].sum() / max(self.rows, 1))

    @property
    def differing_share_L(self) -> NDArray[np.float64]:
        """float64 [L], share of tokens whose expert set differs, per layer."""
        return np.asarray(self.differing_L / max(self.rows, 1), np.float64)

    @property
    def overlap_L(self) -> NDArray[np.float64]:
        """float64 [L], mean share of a token's K experts that both sides picked, per layer."""
        return np.asarray(self.shared_L / max(self.rows * self.top_k, 1), np.float64)

    def __add__(self, other: RoutingMismatch) -> RoutingMismatch:
        """The mismatch over the rows of both."""
        return RoutingMismatch(
            self.rows + other.rows,
            self.top_k,
            self.differing_L + other.differing_L,
            self.shared_L + other.shared_L,
            self.by_differing_layers + other.by_differing_layers,
            self.first_differing_L + other.first_differing_L,
        )


def routing_mismatch(rollout: RoutingTrace, trainer: RoutingTrace) -> RoutingMismatch:
    """Compare two traces of the same tokens.

    Raises:
        SpecMismatchError, BatchMismatchError: when they are of other models or other tokens.
    """
    shared_RL = overlap(rollout, trainer).shared_RL
    differs_RL: NDArray[Any] = shared_RL < rollout.spec.top_k
    num_layers = rollout.spec.num_layers
    per_row = differs_RL.sum(axis=1)
    first = differs_RL.argmax(axis=1)[per_row > 0]
    return RoutingMismatch(
        rows=len(shared_RL),
        top_k=rollout.spec.top_k,
        differing_L=differs_RL.sum(axis=0, dtype=np.int64),
        shared_L=shared_RL.sum(axis=0, dtype=np.int64),
        by_differing_layers=np.bincount(per_row, minlength=num_layers + 1),
        first_differing_L=np.bincount(first, minlength=num_layers),
    )

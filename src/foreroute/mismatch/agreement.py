"""Sums and counts of how a model's own selection agrees with the replayed one, and how close its decisions were.

They are kept so that micro-batches and ranks can be added. A margin is the gap between the last expert that is in and
the first that is out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.mismatch.routing import RoutingMismatch

LOG10_EDGES = np.linspace(-8.0, 1.0, 37)
"""Bin edges of log10(margin), a quarter of a decade wide. Outliers fall into the outermost bins."""


@dataclass(frozen=True, eq=False)
class MarginHistogram:
    """Rows by the decimal logarithm of their top-k margin, per layer.

    Attributes:
        counts_LB: int64 [L, B], for the B bins between `LOG10_EDGES`.
    """

    counts_LB: NDArray[np.int64]

    def __add__(self, other: MarginHistogram) -> MarginHistogram:
        """The histogram over the rows of both."""
        return MarginHistogram(self.counts_LB + other.counts_LB)


def margin_histogram(margins_NL: NDArray[Any]) -> MarginHistogram:
    """Count margins (K-th minus (K+1)-th selection score, [N, L], in the router's own scale) into bins."""
    smallest, largest = 10 ** LOG10_EDGES[0], 10 ** LOG10_EDGES[-1]
    logs = np.log10(np.clip(margins_NL.astype(np.float64), smallest, largest * (1 - 1e-9)))
    counts = [np.histogram(logs[:, layer], bins=LOG10_EDGES)[0] for layer in range(logs.shape[1])]
    return MarginHistogram(np.array(counts, dtype=np.int64).reshape(logs.shape[1], len(LOG10_EDGES) - 1))


@dataclass(frozen=True, eq=False)
class LiveAgreement:
    """Sums and counts over replayed rows. Parts of a batch, micro-batches and ranks are joined with `+`.

    The model's own selection is the one its routers would have made on the very hidden states of the replayed pass, so
    that a difference in one layer does not show up again in the next unless it changes a choice there.

    Attributes:
        routing: rows, differing sets, overlap, first differing layer.
        margins: rows by the gap between the K-th and the (K+1)-th selection score.
        margins_differing: the same, of rows whose set differs.
        replaced_mass_L: float64 [L], summed over rows: the share of a router's own selection mass that lay on experts
            which replay replaced. Mass is the score of a pick over that of all K picks; its exponential where the
            router selects by logits.
    """

    routing: RoutingMismatch
    margins: MarginHistogram
    margins_differing: MarginHistogram
    replaced_mass_L: NDArray[np.float64]

    @classmethod
    def from_sums(cls, sums: Mapping[str, NDArray[Any]], top_k: int) -> LiveAgreement:
        """From arrays named as in `LiveAgreement` and `RoutingMismatch`."""
        return cls(
            RoutingMismatch(
                int(sums["rows"]),
                top_k,
                sums["differing_L"],
                sums["shared_L"],
                sums["by_differing_layers"],
                sums["first_differing_L"],
            ),
            MarginHistogram(sums["margins_LB"]),
            MarginHistogram(sums["margins_differing_LB"]),
            sums["replaced_mass_L"],
        )

    @property
    def replaced_mass_share_L(self) -> NDArray[np.float64]:
        """float64 [L], mean over rows of the replaced share of selection mass, per layer."""
        return np.asarray(self.replaced_mass_L / max(self.routing.rows, 1), np.float64)

    def __add__(self, other: LiveAgreement) -> LiveAgreement:
        """The agreement over the rows of both."""
        return LiveAgreement(
            self.routing + other.routing,
            self.margins + other.margins,
            self.margins_differing + other.margins_differing,
            self.replaced_mass_L + other.replaced_mass_L,
        )

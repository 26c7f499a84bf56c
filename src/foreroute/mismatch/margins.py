"""How close a router's decisions are: the gap between the last expert that is in and the first that is out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

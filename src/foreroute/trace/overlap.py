"""How far two traces of the same tokens agree, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import BatchMismatchError
from foreroute.trace.container import RoutingTrace


@dataclass(frozen=True)
class RouteOverlap:
    """Picks that two traces share.

    Attributes:
        shared_RL: uint8 [R, L], experts picked by both, for the R rows that both traces routed.
        rows_R: int64 [R], the packed row number of each.
    """

    shared_RL: NDArray[np.uint8]
    rows_R: NDArray[np.int64]


def overlap(a: RoutingTrace, b: RoutingTrace) -> RouteOverlap:
    """Count the experts that `a` and `b` both picked, as sets: pick order does not matter.

    Raises:
        SpecMismatchError: when the traces come from different models.
        BatchMismatchError: when they do not hold the same tokens in the same order.
    """
    a.spec.require_same(b.spec, what="the second trace")
    if not np.array_equal(a.offsets, b.offsets) or not np.array_equal(a.token_ids_N, b.token_ids_N):
        raise BatchMismatchError(
            f"the traces hold different tokens ({a.num_rows} rows in {len(a)} sequences, "
            f"{b.num_rows} in {len(b)}); compare traces of the same sequences in the same order"
        )
    rows = np.flatnonzero(a.valid_N & b.valid_N)
    ids_a, ids_b = a.expert_ids_NLK[rows], b.expert_ids_NLK[rows]
    shared = np.zeros(ids_a.shape[:2], np.uint8)
    for k in range(a.spec.top_k):
        shared += (ids_a == ids_b[..., k : k + 1]).any(axis=-1)
    return RouteOverlap(shared, rows)

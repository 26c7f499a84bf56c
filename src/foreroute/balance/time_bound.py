"""The least time that any plan can reach, by the cost model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.balance.costs import BACKWARD, FORWARD, STAGES, CostModel
from foreroute.balance.topology import Topology


def least_seconds(counts_MLGE: NDArray[np.integer], topology: Topology, costs: CostModel) -> NDArray[np.float64]:
    """Recompute and update of every cell when all that a plan can change is as good as it could ever be.

    Attention of the slowest source rank, which no placement of experts changes; the experts' whole work, spread over
    all ranks to the last second; latencies; and not one byte over any link. Splitting an expert over hosts adds tiles
    and reads of weights and never saves any, so whole experts bound the work from below. How little a link must carry
    when slots are few is not bounded here, so where traffic is most of the time, no plan comes near.

    Args:
        counts_MLGE: integers [M, L, G, E].
        topology: ranks and links.
        costs: the cost model.

    Returns:
        float64 [M, L], seconds.
    """
    loads_MLE = counts_MLGE.sum(axis=2, dtype=np.int64)
    tokens_MLG = counts_MLGE.sum(axis=3, dtype=np.int64) / costs.model.top_k
    experts_s = [costs.expert_seconds(loads_MLE, one).sum(axis=2) / topology.num_ranks for one in (FORWARD, BACKWARD)]
    attention_s = [costs.attention_seconds(tokens_MLG, one=one).max(axis=2) for one in (FORWARD, BACKWARD)]
    prices = costs.prices(topology)
    fixed_s = prices.layer_s + 2 * prices.latency_s
    seconds_ML = np.zeros(loads_MLE.shape[:2])
    for stage in STAGES:
        for forwards, backwards in stage.groups:
            seconds_ML += forwards * (attention_s[0] + experts_s[0]) + backwards * (attention_s[1] + experts_s[1])
            seconds_ML += (forwards + backwards) * fixed_s
    return seconds_ML

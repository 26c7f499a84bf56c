"""The cost model on cells: how long experts, exchanges and transfers take, and which parts of a step that is.

Compiled (pricing.hpp).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import BACKWARD, FORWARD, PRICES, CostModel, Prices
from foreroute.errors import CountsError
from foreroute.kernels import ArrayOf, compiled
from foreroute.plan.hosts import HOSTS, Hosts
from foreroute.plan.options import PASS_NAMES, SlotSharing
from foreroute.plan.topology import Topology

Squares = NDArray[np.integer] | None
"""[M, G], sums of squared lengths of the sequences that are counted; None where lengths are not known."""
PART_NAMES = ("attention", "all-to-all", "experts", "fixed", "exposed transfers")
ATTENTION, ALL_TO_ALL, EXPERTS, FIXED, EXPOSED = range(5)


def slowest_attention(
    counts_XGE: NDArray[np.integer], costs: CostModel, squares_MG: Squares = None
) -> NDArray[np.float64]:
    """float64 [..., 2], seconds of the slowest rank's attention in a forward and in a backward pass of cells."""
    # a rank has K assignments for each of its tokens
    tokens_XG = counts_XGE.sum(axis=-1) / costs.model.top_k
    squares_XG = None if squares_MG is None else squares_MG[:, None]  # the same tokens pass all layers
    of_passes = [costs.attention_seconds(tokens_XG, squares_XG, one).max(axis=-1) for one in (FORWARD, BACKWARD)]
    return np.stack(of_passes, axis=-1)


def step_parts(
    hosts: Hosts,
    counts_MLGE: NDArray[np.integer],
    topology: Topology,
    costs: CostModel,
    slots: SlotSharing = "layer",
    squares_MG: Squares = None,
) -> NDArray[np.float64]:
    """float64 [2, 5], seconds of `PASS_NAMES` and `PART_NAMES` of a step, cell by cell of counts [M, L, G, E].

    Raises `PlanError` for hosts of other counts.

    Deduplicated rows are estimated: on generated routes of 16 to 64 ranks 0 to 7 % low over NICs, 6 to 10 % inside
    nodes, and 0 to 3 % in seconds.
    """
    counts = np.ascontiguousarray(counts_MLGE, np.int32)
    # no placement of experts changes attention, so it is priced once for all cells
    return parts_of_cells(hosts, counts, slowest_attention(counts, costs, squares_MG), costs.prices(topology, slots))


def parts_of_cells(
    hosts: Hosts, counts_MLGE: NDArray[np.int32], attention_ML2: NDArray[np.float64], prices: Prices
) -> NDArray[np.float64]:
    """As `step_parts`, where attention takes the slowest rank so long in a forward and in a backward pass."""
    hosts.require_fit(counts_MLGE)
    if attention_ML2.shape != (*counts_MLGE.shape[:2], 2):
        raise CountsError(f"attention is {list(attention_ML2.shape)}; expected {[*counts_MLGE.shape[:2], 2]}")
    parts_SP = np.zeros((len(PASS_NAMES), len(PART_NAMES)))
    _parts(hosts, counts_MLGE, attention_ML2, prices, parts_SP)
    return parts_SP


_parts = compiled(
    "parts_of_cells", HOSTS, ArrayOf(np.int32, 4), ArrayOf(np.float64, 3), PRICES, ArrayOf(np.float64, 2, filled=True)
)


def least_seconds(
    counts_MLGE: NDArray[np.integer], topology: Topology, costs: CostModel, squares_MG: Squares = None
) -> NDArray[np.float64]:
    """float64 [M, L], seconds of recompute and update of every cell that no plan of counts [M, L, G, E] can beat.

    How little a link must carry when slots are few is not bounded, so where traffic is most of the time, no plan comes
    near.
    """
    prices = costs.prices(topology)
    # no placement of experts changes attention
    passes_ML2 = slowest_attention(counts_MLGE, costs, squares_MG) + least_expert_seconds(counts_MLGE, costs)
    passes_ML2 += prices.layer_s + 2 * prices.latency_s
    passes_2 = prices.sweeps[:, 1:].sum(axis=0)
    seconds_ML: NDArray[np.float64] = passes_ML2 @ passes_2
    return seconds_ML


def least_expert_seconds(counts_MLGE: NDArray[np.integer], costs: CostModel) -> NDArray[np.float64]:
    """float64 [M, L, 2], the least seconds of a rank's experts under any plan, in a forward and in a backward pass."""
    # Splitting an expert over hosts adds tiles and reads of weights and never saves any, so whole experts, spread over
    # all ranks to the last second, bound the work from below.
    loads_MLE, ranks = counts_MLGE.sum(axis=2, dtype=np.int64), counts_MLGE.shape[2]
    return np.stack([costs.expert_seconds(loads_MLE, one).sum(axis=2) / ranks for one in (FORWARD, BACKWARD)], axis=-1)


class CellCosts(NamedTuple):
    """Work of each cell on ranks and links in a pass: seconds, but for rows."""

    all_to_all_ML: NDArray[np.float64]  # [M, L], of one dispatch, or combine
    # [M, L, G, 4], of one dispatch, over each rank's NIC out, NIC in, node link out and node link in
    rows_MLG4: NDArray[np.float64]
    experts_MLG2: NDArray[np.float64]  # [M, L, G, 2], forward and backward
    # [M, L, G, 5], of each link of `costs.links`, for one fetch of the replicas in `fetched_R`, and for all gradients
    fetch_MLG5: NDArray[np.float64]
    gradient_MLG5: NDArray[np.float64]


def work_of_cells(hosts: Hosts, counts_MLGE: NDArray[np.integer], prices: Prices) -> CellCosts:
    """Price the work of a step's hosts on ranks and links. Raises `PlanError` for hosts of other counts."""
    hosts.require_fit(counts_MLGE)
    num_micro_steps, num_layers, num_ranks, _ = counts_MLGE.shape
    shapes = ((), (num_ranks, 4), (num_ranks, 2), (num_ranks, 5), (num_ranks, 5))
    work = CellCosts(*(np.zeros((num_micro_steps, num_layers, *shape)) for shape in shapes))
    _work(hosts, np.ascontiguousarray(counts_MLGE, np.int32), prices, *work)
    return work


_FLOATS_X4 = ArrayOf(np.float64, 4, filled=True)
_work = compiled(
    "work_of_cells",
    HOSTS,
    ArrayOf(np.int32, 4),
    PRICES,
    ArrayOf(np.float64, 2, filled=True),
    _FLOATS_X4,
    _FLOATS_X4,
    _FLOATS_X4,
    _FLOATS_X4,
)

"""Cells priced on the tokens as they are: each pick is dealt to a host, and deduplicated rows are counted.

The cost model estimates these rows; here is what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from benchmarks.harness.planner_oracles import CellHosts
from foreroute.costs import links
from foreroute.costs.model import BACKWARD, FORWARD
from foreroute.costs.pricing import seconds_of_rows
from foreroute.errors import CountsError
from foreroute.kernels import kernel
from tests.costs.priced_cells import CellFigures

MAX_NODES = 64  # nodes of a token are bits of one integer


@dataclass(frozen=True, eq=False)
class CellRoutes:
    """The routes of one cell, token by token.

    Attributes:
        ids_TK: int16 [T, K], the experts that each token picked.
        offsets: int64 [G + 1], source rank g holds the tokens `offsets[g]:offsets[g + 1]`.
    """

    ids_TK: NDArray[np.int16]
    offsets: NDArray[np.int64]

    def counts_GE(self, num_experts: int) -> NDArray[np.int32]:
        """int32 [G, E], the assignments that these routes make."""
        source_T = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        flat = (source_T[:, None] * num_experts + self.ids_TK).ravel()
        counts = np.bincount(flat, minlength=(len(self.offsets) - 1) * num_experts)
        return counts.reshape(-1, num_experts).astype(np.int32)


def assign_picks(hosts: CellHosts, routes: CellRoutes, ranks_per_node: int) -> NDArray[np.int32]:
    """Deal every pick to a host, using each host as often as `hosts` says.

    Picks go to the token's own node while its hosts last, else to a node that the token reaches, else anywhere.

    Args:
        hosts: of the cell.
        routes: of the cell, with the counts that the hosts serve.
        ranks_per_node: of the topology; at most 64 nodes.

    Returns:
        int32 [T, K], the index of the host that serves each pick.

    Raises:
        CountsError: when the hosts serve other counts.
    """
    num_ranks = hosts.tokens_HG.shape[1]
    if num_ranks != len(routes.offsets) - 1:
        raise CountsError(f"the hosts are of {num_ranks} source ranks and the routes {len(routes.offsets) - 1}")
    if num_ranks > MAX_NODES * ranks_per_node:
        raise CountsError(f"{num_ranks // ranks_per_node} nodes; token-level routes are dealt over {MAX_NODES} at most")
    num_experts = int(max(hosts.expert_H.max(), routes.ids_TK.max(initial=0))) + 1
    served_EG = np.zeros((num_experts, num_ranks), np.int64)
    np.add.at(served_EG, hosts.expert_H, hosts.tokens_HG)
    wrong = np.argwhere(routes.counts_GE(num_experts) != served_EG.T)
    if len(wrong):
        source, expert = wrong[0]
        raise CountsError(
            f"the hosts serve {served_EG[expert, source]} picks of expert {expert} from rank {source}, which the "
            f"routes do not hold; {len(wrong)} more differ. Use the routes that were counted"
        )
    order = np.argsort(hosts.expert_H, kind="stable").astype(np.int32)
    first_E = np.searchsorted(hosts.expert_H[order], np.arange(num_experts + 1)).astype(np.int64)
    node_H = (hosts.rank_H // ranks_per_node).astype(np.int64)
    left_GH = np.ascontiguousarray(hosts.tokens_HG[order].T)
    host_TK = np.empty(routes.ids_TK.shape, np.int32)
    _assign(routes.ids_TK, routes.offsets, first_E, node_H[order], left_GH, ranks_per_node, host_TK)
    dealt: NDArray[np.int32] = order[host_TK]
    return dealt


def tokens_reaching(
    hosts: CellHosts, routes: CellRoutes, host_TK: NDArray[np.int32], ranks_per_node: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distinct tokens of each source rank that a deal sends to each node and to each rank.

    Returns:
        [G, N] and [G, G], whole numbers.
    """
    return _reach(host_TK, routes.offsets, hosts.rank_H.astype(np.int64), ranks_per_node)  # type: ignore[no-any-return]


def rows_of_tokens(cell, counts_GE, topology, costs, routes):
    """float64 [G, 4], rows of one dispatch over the links of each rank, counted."""
    hosts = CellHosts.of(cell, counts_GE)
    per_node = topology.ranks_per_node
    host_TK = assign_picks(hosts, routes, per_node)
    if costs.dispatcher == "dedup":
        return links.rows_of_reach(*tokens_reaching(hosts, routes, host_TK, per_node), per_node)
    return links.rows_sent(links.pairs_between(cell, counts_GE), costs.prices(topology))


def price_tokens(cell, counts_GE, topology, costs, *, routes, squares_G=None, slots="layer"):
    """As `price_cell`, with deduplicated rows counted, and attention of sequences whose lengths are known."""
    hosts = CellHosts.of(cell, counts_GE)
    tokens_G = np.asarray(counts_GE).sum(axis=1) / costs.model.top_k
    attention_s = np.array([costs.attention_seconds(tokens_G, squares_G, one).max() for one in (FORWARD, BACKWARD)])
    rows_G4 = rows_of_tokens(cell, counts_GE, topology, costs, routes)
    parts_SP = seconds_of_rows(rows_G4, cell, counts_GE, attention_s, costs.prices(topology, slots))
    node_HG = hosts.rank_H[:, None] // topology.ranks_per_node == np.arange(len(counts_GE)) // topology.ranks_per_node
    share = hosts.tokens_HG[~node_HG].sum() / max(hosts.tokens_HG.sum(), 1)
    return CellFigures(hosts.loads_G, float(share), parts_SP)


@kernel
def _assign(
    ids_TK: Any, offsets: Any, first_E: Any, node_H: Any, left_GH: Any, ranks_per_node: int, host_TK: Any
) -> None:
    # Invariant: left_H[h] is what host h may still serve of source rank g. The hosts of an expert add up to its picks,
    # so each host ends at 0 and every pick has one.
    for g in range(len(offsets) - 1):
        own, left_H = g // ranks_per_node, left_GH[g]
        for t in range(offsets[g], offsets[g + 1]):
            nodes = np.uint64(0)
            for k in range(ids_TK.shape[1]):
                e = ids_TK[t, k]
                host = _next_host(first_E[e], first_E[e + 1], left_H, node_H, own, nodes)
                nodes |= np.uint64(1) << np.uint64(node_H[host])
                left_H[host] -= 1
                host_TK[t, k] = host


@njit(nogil=True, inline="always")
def _next_host(first: int, last: int, left_H: Any, node_H: Any, own: int, nodes: Any) -> int:
    """On the token's own node, else on a node that it reaches anyway, else anywhere."""
    best, best_class = -1, 3
    for h in range(first, last):
        if left_H[h] > 0:
            if node_H[h] == own:
                return h
            its_class = 1 if (nodes >> np.uint64(node_H[h])) & np.uint64(1) else 2
            if its_class < best_class:
                best, best_class = h, its_class
    return best


@kernel
def _reach(host_TK: Any, offsets: Any, rank_H: Any, ranks_per_node: int) -> Any:
    num_ranks = len(offsets) - 1
    reach_GN = np.zeros((num_ranks, num_ranks // ranks_per_node))
    reach_GG = np.zeros((num_ranks, num_ranks))
    seen_rank = np.full(num_ranks, -1, np.int64)
    seen_node = np.full(num_ranks // ranks_per_node, -1, np.int64)
    node_H = rank_H // ranks_per_node
    for g in range(num_ranks):
        reach_N, reach_G = reach_GN[g], reach_GG[g]
        for t in range(offsets[g], offsets[g + 1]):
            for k in range(host_TK.shape[1]):
                # Without branches: which ranks a token meets again cannot be predicted.
                rank, node = rank_H[host_TK[t, k]], node_H[host_TK[t, k]]
                reach_G[rank] += seen_rank[rank] != t
                reach_N[node] += seen_node[node] != t
                seen_rank[rank] = t
                seen_node[node] = t
    return reach_GN, reach_GG

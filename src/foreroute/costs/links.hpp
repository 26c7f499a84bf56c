// The one price of moving bytes, as costs/links.py describes it.
#pragma once

#include "plan/hosts.hpp"

namespace costs {

// Columns of arrays over the links of a rank; those over four have no HOST.
enum : int64_t { CLUSTER_OUT, CLUSTER_IN, NODE_OUT, NODE_IN, HOST };

// As costs/model.py defines them.
struct ExpertPrices {
    int64_t tile_rows;
    double row_s, weight_s, pair_s, replica_s;
};

struct Prices {
    ExpertPrices forward, backward;
    double node_row_s, cluster_row_s, latency_s;
    double host_fetch_s, node_fetch_s, cluster_fetch_s;
    double node_gradient_s, cluster_gradient_s;
    double layer_s;
    bool dedup;
    int64_t top_k, ranks_per_node, memory_ranks;
    Array<const int64_t, 2> sweeps;
    bool refetches;

    bool is_near(int64_t rank, int64_t other) const { return rank / ranks_per_node == other / ranks_per_node; }
};

// A cell whose experts serve at their homes alone, from which the figures of its plans differ by what replicas serve.
struct AtHome {
    Scratch<int64_t, 2> served_GG;  // assignments that each rank (first axis) serves of each source rank
    Scratch<int64_t, 1> served_E;

    AtHome(const Array<int16_t, 1> &home_E, const Array<const int32_t, 2> &counts_GE)
        : served_GG(counts_GE.shape[0], counts_GE.shape[0]), served_E(counts_GE.shape[1]) {
        const auto [num_ranks, num_experts] = counts_GE.shape;
        for (int64_t g = 0; g < num_ranks; ++g)
            for (int64_t e = 0; e < num_experts; ++e) {
                served_GG(home_E[e], g) += counts_GE(g, e);
                served_E(e) += counts_GE(g, e);
            }
    }
};

// Fill in what each rank (first axis) serves of each source rank under a plan.
inline void find_served(const CellPlan &cell, const AtHome &at_home, const Array<int64_t, 2> &served_GG) {
    served_GG.copy(at_home.served_GG);
    for (int64_t r = 0; r < cell.expert_R.length(); ++r) {
        const auto tokens_G = cell.tokens_RG[r];
        const auto here_G = served_GG[cell.rank_R[r]], home_G = served_GG[cell.home_E[cell.expert_R[r]]];
        for (int64_t g = 0; g < tokens_G.length(); ++g) {
            here_G(g) += tokens_G[g];
            home_G(g) -= tokens_G[g];
        }
    }
}

// Multiplied up as ever, by repeated squaring, so that plans stay the same to the last bit.
inline double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1) result *= base;
    return result;
}

inline void rows_of_copies(const Array<const int64_t, 2> &served_GG, const Prices &prices,
                           const Array<double, 2> &rows_G4) {
    const int64_t num_ranks = served_GG.length();
    for (int64_t q = 0; q < num_ranks; ++q) {
        const int64_t begin = q / prices.ranks_per_node * prices.ranks_per_node, end = begin + prices.ranks_per_node;
        for (int64_t g = 0; g < num_ranks; ++g) {
            if (g == q) continue;
            const bool is_near = begin <= g && g < end;
            rows_G4(g, is_near ? NODE_OUT : CLUSTER_OUT) += static_cast<double>(served_GG(q, g));
            rows_G4(q, is_near ? NODE_IN : CLUSTER_IN) += static_cast<double>(served_GG(q, g));
        }
    }
}

// As `rows_sent`, of the tokens of each source with a pick on each node, and on each rank.
inline void rows_of_reach(const Array<double, 2> &reach_GN, const Array<double, 2> &reach_GG, int64_t ranks_per_node,
                          const Array<double, 2> &rows_G4) {
    const auto [num_ranks, num_nodes] = reach_GN.shape;
    for (int64_t g = 0; g < num_ranks; ++g)
        for (int64_t node = 0; node < num_nodes; ++node) {
            // as DeepEP sends them: a row crosses to a node once, to the rank with the source's number there, and that
            // rank passes it on; on the source's own node it is the source itself
            const int64_t relay = node * ranks_per_node + g % ranks_per_node;
            if (relay != g) {
                rows_G4(g, CLUSTER_OUT) += reach_GN(g, node);
                rows_G4(relay, CLUSTER_IN) += reach_GN(g, node);
            }
            for (int64_t q = node * ranks_per_node; q < (node + 1) * ranks_per_node; ++q)
                if (q != relay) {
                    rows_G4(relay, NODE_OUT) += reach_GG(g, q);
                    rows_G4(q, NODE_IN) += reach_GG(g, q);
                }
        }
}

// Rows of one dispatch over each rank's NIC out, NIC in, node link out and node link in, added to zeros.
inline void rows_sent(const Array<const int64_t, 2> &served_GG, const Prices &prices,
                      const Array<double, 2> &rows_G4) {
    if (!prices.dedup) return rows_of_copies(served_GG, prices, rows_G4);
    // An estimate, since counts do not tell which picks are of one token: with K independent draws, n tokens that send
    // a share p of their picks somewhere reach it n * (1 - (1 - p) ** K) times.
    const int64_t num_ranks = served_GG.length(), num_nodes = num_ranks / prices.ranks_per_node;
    Scratch<double, 2> reach_GN(num_ranks, num_nodes), reach_GG(num_ranks, num_ranks);
    for (int64_t g = 0; g < num_ranks; ++g) {
        int64_t pairs = 0;
        for (int64_t q = 0; q < num_ranks; ++q) pairs += served_GG(q, g);
        if (pairs == 0) continue;
        const double all = static_cast<double>(pairs), tokens = all / static_cast<double>(prices.top_k);
        const auto reached = [&](int64_t some) {
            return tokens * (1.0 - power(1.0 - static_cast<double>(some) / all, prices.top_k));
        };
        for (int64_t node = 0; node < num_nodes; ++node) {
            int64_t inside = 0;
            for (int64_t q = node * prices.ranks_per_node; q < (node + 1) * prices.ranks_per_node; ++q) {
                inside += served_GG(q, g);
                reach_GG(g, q) = reached(served_GG(q, g));
            }
            reach_GN(g, node) = reached(inside);
        }
    }
    rows_of_reach(reach_GN, reach_GG, prices.ranks_per_node, rows_G4);
}

// Seconds of one dispatch, or of one combine, which sends the same rows back.
inline double all_to_all_seconds(const Array<double, 2> &rows_G4, const Prices &prices) {
    double slowest = 0.0;
    for (int64_t g = 0; g < rows_G4.length(); ++g) {
        const double cluster = max(rows_G4(g, CLUSTER_OUT), rows_G4(g, CLUSTER_IN)) * prices.cluster_row_s;
        const double node = max(rows_G4(g, NODE_OUT), rows_G4(g, NODE_IN)) * prices.node_row_s;
        // links work beside each other, and all ranks wait for the slowest
        slowest = max(slowest, max(cluster, node));
    }
    return slowest + prices.latency_s;
}

// Seconds of each link for one fetch of the replicas in `fetched_R`, and for all gradients, added to zeros. Replicas at
// home move nothing.
inline void transfer_seconds(const CellPlan &cell, const Prices &prices, const Array<double, 2> &fetch_G5,
                             const Array<double, 2> &gradient_G5) {
    for (int64_t r = 0; r < cell.rank_R.length(); ++r) {
        const int64_t rank = cell.rank_R[r], home = cell.home_E[cell.expert_R[r]];
        if (rank == home) continue;
        const bool is_near = prices.is_near(rank, home);
        const int64_t out = is_near ? NODE_OUT : CLUSTER_OUT, into = is_near ? NODE_IN : CLUSTER_IN;
        if (cell.fetched_R[r] && rank / prices.memory_ranks == home / prices.memory_ranks) {
            fetch_G5(rank, HOST) += prices.host_fetch_s;
        } else if (cell.fetched_R[r]) {
            const double fetch_s = is_near ? prices.node_fetch_s : prices.cluster_fetch_s;
            fetch_G5(home, out) += fetch_s;
            fetch_G5(rank, into) += fetch_s;
        }
        // from every replica, and never through host memory: a slot keeps weights, but not what one micro-step adds
        const double gradient_s = is_near ? prices.node_gradient_s : prices.cluster_gradient_s;
        gradient_G5(rank, out) += gradient_s;
        gradient_G5(home, into) += gradient_s;
    }
}

}  // namespace costs

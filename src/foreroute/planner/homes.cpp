// The search for homes of one layer, as planner/homes.py describes it.
#include "kernels.hpp"

namespace homes {

// Homes of one layer, and what follows from them. Exchanges keep all of it in step.
struct Placement {
    // [E + G + N, M], a row for each expert, its load; for each rank, its surplus over the mean, below 0 where it has
    // less; and for each node, the same
    const Array<int32_t, 2> &table_XM;
    const Array<int64_t, 1> &home_E;
    const Array<const int64_t, 1> &start_E;  // the homes that the budget counts from
    const int64_t max_moves;                 // most experts that may be away from there, at least 2
    const int64_t ranks_per_node;
    Scratch<int32_t, 1> cost_X;   // the sum of what is above 0 in the rows of ranks and nodes
    Scratch<int32_t, 2> pull_EG;  // the slope of the objective in the presence of each expert on each rank
    int64_t moves = 0;            // how many experts are away from their start

    int64_t num_experts() const { return home_E.length(); }
    int64_t num_nodes() const { return pull_EG.shape[1] / ranks_per_node; }
    int64_t rank_row(int64_t g) const { return num_experts() + g; }
    int64_t node_row(int64_t node) const { return num_experts() + pull_EG.shape[1] + node; }
};

INLINED int32_t cost(const Array<int32_t, 1> &surplus_M) {
    int32_t sum = 0;
    for (int64_t m = 0; m < surplus_M.length(); ++m) sum += max(surplus_M[m], 0);
    return sum;
}

// Bring the slopes on the ranks of a node up to date.
INLINED void pull(const Placement &now, int64_t node) {
    const Array<int32_t, 1> node_M = now.table_XM[now.node_row(node)];
    for (int64_t g = node * now.ranks_per_node; g < (node + 1) * now.ranks_per_node; ++g) {
        const Array<int32_t, 1> rank_M = now.table_XM[now.rank_row(g)];
        for (int64_t e = 0; e < now.num_experts(); ++e) {
            const Array<int32_t, 1> load_M = now.table_XM[e];
            int32_t sum = 0;
            for (int64_t m = 0; m < load_M.length(); ++m)
                sum += (rank_M[m] > 0 ? 2 * load_M[m] : 0) + (node_M[m] > 0 ? load_M[m] : 0);
            now.pull_EG(e, g) = sum;
        }
    }
}

// Number of experts more that are away from their start once e and f have exchanged their homes.
INLINED int64_t more_moves(const Placement &now, int64_t e, int64_t f) {
    const int64_t a = now.home_E[e], b = now.home_E[f];
    return (now.start_E[e] == a) - (now.start_E[e] == b) + (now.start_E[f] == b) - (now.start_E[f] == a);
}

// Change of the cost of rows x and y when e leaves x for y and f leaves y for x.
INLINED int64_t exchanged(const Placement &now, int64_t e, int64_t f, int64_t x, int64_t y) {
    const Array<int32_t, 1> e_M = now.table_XM[e], f_M = now.table_XM[f];
    const Array<int32_t, 1> x_M = now.table_XM[x], y_M = now.table_XM[y];
    int32_t sum = 0;
    for (int64_t m = 0; m < e_M.length(); ++m) {
        const int32_t moved = e_M[m] - f_M[m];
        sum += max(x_M[m] - moved, 0) + max(y_M[m] + moved, 0);
    }
    return sum - now.cost_X[x] - now.cost_X[y];
}

// Change of the objective by the exchange of e and f, which live on different ranks.
INLINED int64_t change(const Placement &now, int64_t e, int64_t f) {
    const int64_t a = now.home_E[e], b = now.home_E[f];
    const int64_t u = a / now.ranks_per_node, v = b / now.ranks_per_node;
    const int64_t of_ranks = 2 * exchanged(now, e, f, now.rank_row(a), now.rank_row(b));
    return u == v ? of_ranks : of_ranks + exchanged(now, e, f, now.node_row(u), now.node_row(v));
}

// Let e leave row x for y and f leave y for x.
INLINED void shift(const Placement &now, int64_t e, int64_t f, int64_t x, int64_t y) {
    const Array<int32_t, 1> x_M = now.table_XM[x], y_M = now.table_XM[y];
    for (int64_t m = 0; m < x_M.length(); ++m) {
        const int32_t moved = now.table_XM(e, m) - now.table_XM(f, m);
        x_M(m) -= moved;
        y_M(m) += moved;
    }
    now.cost_X(x) = cost(x_M);
    now.cost_X(y) = cost(y_M);
}

// Exchange the homes of e and f.
INLINED void swap(Placement &now, int64_t e, int64_t f) {
    const int64_t a = now.home_E[e], b = now.home_E[f];
    const int64_t u = a / now.ranks_per_node, v = b / now.ranks_per_node;
    shift(now, e, f, now.rank_row(a), now.rank_row(b));
    if (u != v) shift(now, e, f, now.node_row(u), now.node_row(v));
    now.moves += more_moves(now, e, f);
    now.home_E(e) = b;
    now.home_E(f) = a;
    // slopes have changed on ranks of these nodes alone
    pull(now, u);
    if (u != v) pull(now, v);
}

// Make the best exchange that the budget allows until none improves. Ties go to the lowest experts.
INLINED void search(Placement &now) {
    for (int64_t node = 0; node < now.num_nodes(); ++node) pull(now, node);
    // Invariant: at most `max_moves` experts are away from their start. Each round lowers the objective, so it ends.
    while (true) {
        int64_t best = 0, best_e = NONE, best_f = NONE;
        for (int64_t e = 0; e < now.home_E.length(); ++e)
            for (int64_t f = e + 1; f < now.home_E.length(); ++f) {
                const int64_t a = now.home_E[e], b = now.home_E[f];
                // The objective is convex in the loads, so its slope bounds what an exchange can change, and most need
                // no exact look.
                const int64_t bound =
                    int64_t{now.pull_EG(e, b)} - now.pull_EG(e, a) + now.pull_EG(f, a) - now.pull_EG(f, b);
                if (bound >= best || now.moves + more_moves(now, e, f) > now.max_moves) continue;
                const int64_t changed = change(now, e, f);
                if (changed < best) best = changed, best_e = e, best_f = f;
            }
        if (best_e == NONE) return;
        swap(now, best_e, best_f);
    }
}

WIDE void search_wide(Placement &now) { search(now); }

}  // namespace homes

// Exchange homes in `home_E`, which begins as `start_E`; `table_XM` holds what follows from it.
LOOP void exchange_homes(const Array<int32_t, 2> &table_XM, const Array<int64_t, 1> &home_E,
                         const Array<const int64_t, 1> &start_E, int64_t num_ranks, int64_t ranks_per_node,
                         int64_t max_moves) {
    homes::Placement now = {table_XM, home_E, start_E, max_moves, ranks_per_node,
                            Scratch<int32_t, 1>(table_XM.length()), Scratch<int32_t, 2>(home_E.length(), num_ranks)};
    for (int64_t x = home_E.length(); x < table_XM.length(); ++x) now.cost_X(x) = homes::cost(table_XM[x]);
    (has_wide_vectors ? homes::search_wide : homes::search)(now);
}

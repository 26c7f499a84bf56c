#include "costs/links.hpp"

// What each rank serves in each cell of [M, L], how much of it comes from another node, and how many experts are moved
// there.
LOOP void loads_of_cells(const Hosts &hosts, const Array<const int32_t, 4> &counts_MLGE, int64_t ranks_per_node,
                       const Array<int64_t, 3> &served_MLG, const Array<int64_t, 2> &crossing_ML,
                       const Array<int64_t, 2> &fetches_ML) {
    const auto [num_micro_steps, num_layers, num_ranks, num_experts] = counts_MLGE.shape;
    Scratch<int64_t, 2> served_GG(num_ranks, num_ranks);
    for (int64_t m = 0; m < num_micro_steps; ++m)
        for (int64_t layer = 0; layer < num_layers; ++layer) {
            const CellPlan cell = hosts.cell(m * num_layers + layer);
            costs::find_served(cell, costs::AtHome(cell.home_E, counts_MLGE[m][layer]), served_GG);
            for (int64_t q = 0; q < num_ranks; ++q)
                for (int64_t g = 0; g < num_ranks; ++g) {
                    served_MLG(m, layer, q) += served_GG(q, g);
                    if (g / ranks_per_node != q / ranks_per_node) crossing_ML(m, layer) += served_GG(q, g);
                }
            // a home that a balancer lists has kept its weights: it is where they are trained
            for (int64_t r = 0; r < cell.expert_R.length(); ++r)
                fetches_ML(m, layer) += cell.fetched_R[r] && cell.home_E[cell.expert_R[r]] != cell.rank_R[r];
        }
}

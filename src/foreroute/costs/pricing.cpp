#include "costs/pricing.hpp"

// The sum over all cells, in their order.
LOOP void parts_of_cells(const Hosts &hosts, const Array<const int32_t, 4> &counts_MLGE,
                         const Array<const double, 3> &attention_ML2, const costs::Prices &prices,
                         const Array<double, 2> &parts_SP) {
    for (int64_t m = 0; m < counts_MLGE.shape[0]; ++m)
        for (int64_t layer = 0; layer < counts_MLGE.shape[1]; ++layer) {
            const CellPlan cell = hosts.cell(m * counts_MLGE.shape[1] + layer);
            const costs::AtHome at_home(cell.home_E, counts_MLGE[m][layer]);
            costs::cell_seconds(cell, at_home, attention_ML2[m][layer], prices).add_to(parts_SP);
        }
}

// What each cell puts on ranks and links, added to zeros.
LOOP void work_of_cells(const Hosts &hosts, const Array<const int32_t, 4> &counts_MLGE, const costs::Prices &prices,
                        const Array<double, 2> &all_to_all_ML, const Array<double, 4> &rows_MLG4,
                        const Array<double, 4> &experts_MLG2, const Array<double, 4> &fetch_MLG5,
                        const Array<double, 4> &gradient_MLG5) {
    const auto [num_micro_steps, num_layers, num_ranks, num_experts] = counts_MLGE.shape;
    Scratch<int64_t, 2> served_GG(num_ranks, num_ranks);
    for (int64_t m = 0; m < num_micro_steps; ++m)
        for (int64_t layer = 0; layer < num_layers; ++layer) {
            const CellPlan cell = hosts.cell(m * num_layers + layer);
            const costs::AtHome at_home(cell.home_E, counts_MLGE[m][layer]);
            costs::find_served(cell, at_home, served_GG);
            costs::rows_sent(served_GG, prices, rows_MLG4[m][layer]);
            all_to_all_ML(m, layer) = costs::all_to_all_seconds(rows_MLG4[m][layer], prices);
            costs::experts_by_rank(cell, at_home, prices, experts_MLG2[m][layer]);
            costs::transfer_seconds(cell, prices, fetch_MLG5[m][layer], gradient_MLG5[m][layer]);
        }
}

// The cost model on one cell, as costs/pricing.py describes it.
#pragma once

#include "costs/links.hpp"

namespace costs {

enum : int64_t { ATTENTION, ALL_TO_ALL, EXPERTS, FIXED, EXPOSED };

// Seconds of a cell by pass and part.
struct Parts {
    double seconds[2][5] = {};

    double sum() const {
        double all = 0.0;
        for (const auto &pass : seconds)
            for (const double part : pass) all += part;
        return all;
    }

    bool is_exposed() const { return seconds[0][EXPOSED] + seconds[1][EXPOSED] != 0; }

    void add_to(const Array<double, 2> &parts_SP) const {
        for (int64_t s = 0; s < 2; ++s)
            for (int64_t part = 0; part < 5; ++part) parts_SP(s, part) += seconds[s][part];
    }
};

// Seconds of one local expert, as in costs/model.py.
inline double expert_seconds(int64_t tokens, const ExpertPrices &of) {
    // a tile that is not full takes as long, and an expert without tokens reads no weights
    return static_cast<double>(ceil_div(tokens, of.tile_rows) * of.tile_rows) * of.row_s +
           (tokens > 0 ? of.weight_s : 0.0) + static_cast<double>(tokens) * of.pair_s;
}

// Seconds of each rank's experts in a forward pass, and in a backward pass, added to zeros.
inline void experts_by_rank(const CellPlan &cell, const AtHome &at_home, const Prices &prices,
                            const Array<double, 2> &experts_G2) {
    const int64_t num_experts = cell.home_E.length();
    const auto spend = [&](int64_t rank, int64_t tokens) {
        experts_G2(rank, 0) += expert_seconds(tokens, prices.forward);
        experts_G2(rank, 1) += expert_seconds(tokens, prices.backward);
    };
    Scratch<int64_t, 1> home_tokens_E(num_experts);
    home_tokens_E.copy(at_home.served_E);
    for (int64_t r = 0; r < cell.expert_R.length(); ++r) {
        const auto tokens_G = cell.tokens_RG[r];
        int64_t tokens = 0;
        for (int64_t g = 0; g < tokens_G.length(); ++g) tokens += tokens_G[g];
        // the home serves what no replica does
        const int64_t rank = cell.rank_R[r], home = cell.home_E[cell.expert_R[r]];
        home_tokens_E(cell.expert_R[r]) -= tokens;
        spend(rank, tokens);
        if (rank != home) {
            // both ends spend time on a replica, whatever it serves
            experts_G2(rank, 0) += prices.forward.replica_s;
            experts_G2(home, 0) += prices.forward.replica_s;
            experts_G2(rank, 1) += prices.backward.replica_s;
            experts_G2(home, 1) += prices.backward.replica_s;
        }
    }
    for (int64_t e = 0; e < num_experts; ++e) spend(cell.home_E[e], home_tokens_E[e]);
}

// Seconds of a cell. `attention_2` are those of the slowest rank, in a forward pass and in a backward pass.
inline Parts cell_seconds(const CellPlan &cell, const AtHome &at_home, const Array<const double, 1> &attention_2,
                          const Prices &prices) {
    const int64_t num_ranks = at_home.served_GG.length();
    Scratch<int64_t, 2> served_GG(num_ranks, num_ranks);
    find_served(cell, at_home, served_GG);
    Scratch<double, 2> rows_G4(num_ranks, 4), experts_G2(num_ranks, 2);
    Scratch<double, 2> fetch_G5(num_ranks, 5), gradient_G5(num_ranks, 5);
    rows_sent(served_GG, prices, rows_G4);
    const double leg_s = all_to_all_seconds(rows_G4, prices);
    experts_by_rank(cell, at_home, prices, experts_G2);
    transfer_seconds(cell, prices, fetch_G5, gradient_G5);
    double forward_s = 0.0, backward_s = 0.0, copies_s = 0.0;
    for (int64_t g = 0; g < num_ranks; ++g) {
        forward_s = max(forward_s, experts_G2(g, 0));
        backward_s = max(backward_s, experts_G2(g, 1));
        copies_s = max(copies_s, fetch_G5(g, HOST));
    }
    Parts parts;
    double fetches_S[2] = {};
    for (int64_t i = 0; i < prices.sweeps.length(); ++i) {
        const int64_t pass = prices.sweeps(i, 0);
        const double forwards = static_cast<double>(prices.sweeps(i, 1));
        const double backwards = static_cast<double>(prices.sweeps(i, 2));
        const double attention = forwards * attention_2[0] + backwards * attention_2[1];
        const double all_to_all = 2 * (forwards + backwards) * leg_s;
        const double experts = forwards * forward_s + backwards * backward_s;
        const double fixed = (forwards + backwards) * prices.layer_s;
        double *seconds_P = parts.seconds[pass];
        seconds_P[ATTENTION] += attention;
        seconds_P[ALL_TO_ALL] += all_to_all;
        seconds_P[EXPERTS] += experts;
        seconds_P[FIXED] += fixed;
        // Transfers run beside the cell before, which is taken to be as long as this one: a layer's time once the
        // pipeline of layers runs. Copies from host memory have the whole of a sweep. Slots that a layer
        // keeps are filled once in a pass, shared ones for each sweep.
        if (prices.refetches || fetches_S[pass] == 0) {
            seconds_P[EXPOSED] += max(0.0, copies_s - (attention + all_to_all + experts + fixed));
            fetches_S[pass] += 1;
        }
    }
    for (int64_t pass = 0; pass < 2; ++pass) {
        double links_s = 0.0, free_s = 0.0;
        for (int64_t g = 0; g < num_ranks; ++g)
            for (int64_t link = 0; link < HOST; ++link)
                links_s = max(links_s, fetches_S[pass] * fetch_G5(g, link) +
                                           static_cast<double>(pass) * gradient_G5(g, link));
        // links are free while nothing is exchanged between ranks, waits for copies included
        for (int64_t part = 0; part < 5; ++part) free_s += part == ALL_TO_ALL ? 0.0 : parts.seconds[pass][part];
        parts.seconds[pass][EXPOSED] += max(0.0, links_s - free_s);
    }
    return parts;
}

}  // namespace costs

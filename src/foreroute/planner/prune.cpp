// Dropping replicas whose transfers expose more time than they save, by the cost model (planner/priced.py).
#include "costs/pricing.hpp"

// The replica that serves least of those on the busiest link of the step; NONE when nothing moves.
LOOP int64_t least_on_busiest(const CellPlan &cell, int64_t num_ranks, const costs::Prices &prices) {
    Scratch<double, 2> fetch_G5(num_ranks, 5), gradient_G5(num_ranks, 5);
    costs::transfer_seconds(cell, prices, fetch_G5, gradient_G5);
    // slots that keep what they hold are filled once for each of the two passes
    const double fetches = static_cast<double>(prices.refetches ? prices.sweeps.length() : 2);
    int64_t rank = NONE, link = NONE;
    double most = -1.0;
    for (int64_t g = 0; g < num_ranks; ++g)
        for (int64_t i = 0; i < 5; ++i) {
            const double busy = fetches * fetch_G5(g, i) + gradient_G5(g, i);
            if (busy > most) rank = g, link = i, most = busy;
        }
    int64_t best = NONE, fewest = 0;
    for (int64_t r = 0; r < cell.expert_R.length(); ++r) {
        const int64_t here = cell.rank_R[r], home = cell.home_E[cell.expert_R[r]];
        const bool in_memory = here / prices.memory_ranks == home / prices.memory_ranks;
        const bool involved = link == costs::HOST ? cell.fetched_R[r] && here == rank && in_memory
                                                  : (here == rank || home == rank) &&
                                                        prices.is_near(here, home) == (link >= costs::NODE_OUT);
        if (here == home || !involved) continue;
        int64_t served = 0;
        for (int64_t g = 0; g < num_ranks; ++g) served += cell.tokens_RG(r, g);
        if (best == NONE || served < fewest) best = r, fewest = served;
    }
    return best;
}

namespace prune {

// Let another host of the expert take over what a replica serves: the one on the rank that serves least.
void reassign(const CellPlan &cell, const Array<bool, 1> &kept_R, int64_t r, const Array<int64_t, 1> &load_G) {
    const int64_t home = cell.home_E[cell.expert_R[r]];
    int64_t taker = NONE, rank = home;  // the home, which serves what no replica does
    for (int64_t other = 0; other < kept_R.length(); ++other)
        if (kept_R[other] && cell.expert_R[other] == cell.expert_R[r] && load_G[cell.rank_R[other]] < load_G[rank])
            taker = other, rank = cell.rank_R[other];
    for (int64_t g = 0; g < load_G.length(); ++g) {
        const int32_t tokens = cell.tokens_RG(r, g);
        load_G(rank) += tokens;
        load_G(cell.rank_R[r]) -= tokens;
        if (taker != NONE) cell.tokens_RG(taker, g) += tokens;
        cell.tokens_RG(r, g) = 0;
    }
    cell.rank_R(r) = static_cast<int16_t>(home);
}

}  // namespace prune

// Which replicas the fastest plan keeps, and what they serve; returns how many it does without.
LOOP int64_t prune_replicas(const CellPlan &cell, const Array<const int32_t, 2> &counts_GE,
                            const Array<const double, 1> &attention_2, const costs::Prices &prices,
                            const Array<bool, 1> &best_R, const Array<int32_t, 2> &best_RG) {
    // One after another goes the replica that serves least of those whose weights or gradients are on the busiest link;
    // another host of its expert takes over. The fastest plan of this series is the answer.
    const int64_t num_ranks = counts_GE.length(), num_replicas = best_R.length();
    const costs::AtHome at_home(cell.home_E, counts_GE);
    Scratch<int64_t, 2> served_GG(num_ranks, num_ranks);
    Scratch<int64_t, 1> load_G(num_ranks);
    costs::find_served(cell, at_home, served_GG);
    for (int64_t q = 0; q < num_ranks; ++q)
        for (int64_t g = 0; g < num_ranks; ++g) load_G(q) += served_GG(q, g);
    // A replica that is dropped stays in its row, at home, where it serves nothing and moves nothing.
    Scratch<int16_t, 1> rank_R(num_replicas);
    Scratch<int32_t, 2> tokens_RG(num_replicas, num_ranks);
    Scratch<bool, 1> kept_R(num_replicas);
    rank_R.copy(cell.rank_R);
    tokens_RG.copy(cell.tokens_RG);
    kept_R.fill(true);
    const CellPlan now = {cell.home_E, cell.expert_R, rank_R, cell.slot_R, cell.fetched_R, tokens_RG};
    int64_t best = 0;
    double best_s = INFINITY;
    // One replica goes in each round, so there are at most as many rounds as replicas.
    for (int64_t dropped = 0;; ++dropped) {
        const costs::Parts parts = costs::cell_seconds(now, at_home, attention_2, prices);
        if (parts.sum() < best_s) {
            best = dropped;
            best_s = parts.sum();
            best_R.copy(kept_R);
            best_RG.copy(tokens_RG);
        }
        if (!parts.is_exposed()) return best;
        const int64_t r = least_on_busiest(now, num_ranks, prices);
        if (r == NONE) return best;
        kept_R(r) = false;
        prune::reassign(now, kept_R, r, load_G);
    }
}

// Replicas that keep tokens on their node, as planner/traffic.py describes them.
#include "costs/pricing.hpp"
#include "planner/split.hpp"

namespace traffic {

// A plan that saves less than this share of a cell's seconds is not worth its transfers: the cost model is not exact to
// a part in a thousand.
constexpr double WORTH = 1e-3;

// What each node serves of each expert.
void quotas(const Array<int64_t, 2> &demand_NE, const Array<bool, 2> &hosted_NE, const Array<int64_t, 2> &quota_NE) {
    const auto [num_nodes, num_experts] = demand_NE.shape;
    Scratch<int64_t, 1> load_N(num_nodes), foreign_E(num_experts), hosts_E(num_experts);
    for (int64_t node = 0; node < num_nodes; ++node)
        for (int64_t e = 0; e < num_experts; ++e) {
            const int64_t demand = demand_NE(node, e), served = hosted_NE(node, e) ? demand : 0;
            quota_NE(node, e) = served;
            load_N(node) += served;
            foreign_E(e) += demand - served;
            hosts_E(e) += hosted_NE(node, e);
        }
    // Invariant: load_N is the sum of quota_NE over experts. Experts with one host first: nothing is to be chosen
    // there.
    for (int64_t flexible = 0; flexible < 2; ++flexible)
        for (int64_t e = 0; e < num_experts; ++e) {
            if ((hosts_E[e] > 1) != flexible) continue;
            while (foreign_E[e] > 0) {
                int64_t first = NONE, second = NONE;
                for (int64_t node = 0; node < num_nodes; ++node) {
                    if (!hosted_NE(node, e)) continue;
                    if (first == NONE || load_N[node] < load_N[first])
                        second = first, first = node;
                    else if (second == NONE || load_N[node] < load_N[second])
                        second = node;
                }
                int64_t amount = foreign_E[e];
                // The emptiest node takes what brings it to the load of the next, so that both are even; where that is
                // little, half of what is left instead, so that an expert ends in few pieces (each a transfer of rows
                // to another node), at most one for each time that its tokens can be halved.
                if (second != NONE) amount = min(amount, max(load_N[second] - load_N[first], (amount + 1) / 2));
                quota_NE(first, e) += amount;
                load_N(first) += amount;
                foreign_E(e) -= amount;
            }
        }
}

// An expert that a node's tokens want to have on their node.
struct Wish {
    int32_t node, expert;
};

// A cell whose replicas are chosen anew, and what is the same for all trials.
struct Trial {
    const Array<int16_t, 1> &home_E;
    const Array<const int16_t, 2> &held_GS;
    const Array<const double, 2> &worth_NE;
    int64_t ranks_per_node, target, num_wishes = 0;
    Scratch<int32_t, 2> counts_EG;  // plans are split expert by expert
    Scratch<int64_t, 2> demand_NE;  // assignments of each node's own tokens
    Scratch<bool, 2> holds_EG;
    Scratch<Wish, 1> wish_X;  // the strongest first
    // of one trial
    Scratch<bool, 2> hosted_NE;
    Scratch<int64_t, 2> left_NE;    // what nodes serve and no rank yet
    Scratch<int32_t, 2> served_EG;  // what each rank serves of each expert
    Scratch<int64_t, 1> load_G;

    // `order_X` are the flat indices of `wanted_NE`, the most wanted first.
    Trial(const CellPlan &cell, const Array<const int32_t, 2> &counts_GE, const Array<const int16_t, 2> &held,
          const Array<const double, 2> &wanted_NE, const Array<const int64_t, 1> &order_X,
          const Array<const double, 2> &worth, int64_t per_node, int64_t most)
        : home_E(cell.home_E), held_GS(held), worth_NE(worth), ranks_per_node(per_node), target(most),
          counts_EG(counts_GE.shape[1], counts_GE.shape[0]), demand_NE(worth.shape[0], worth.shape[1]),
          holds_EG(counts_GE.shape[1], counts_GE.shape[0]), wish_X(worth.size()),
          hosted_NE(worth.shape[0], worth.shape[1]), left_NE(worth.shape[0], worth.shape[1]),
          served_EG(counts_GE.shape[1], counts_GE.shape[0]), load_G(counts_GE.shape[0]) {
        const auto [num_ranks, num_experts] = counts_GE.shape;
        for (int64_t g = 0; g < num_ranks; ++g) {
            const auto demand_E = demand_NE[g / ranks_per_node];
            for (int64_t e = 0; e < num_experts; ++e) demand_E(e) += counts_EG(e, g) = counts_GE(g, e);
            for (int64_t s = 0; s < held_GS.shape[1]; ++s)
                if (held_GS(g, s) != NONE) holds_EG(held_GS(g, s), g) = true;
        }
        for (int64_t i = 0; i < order_X.length(); ++i) {
            const int64_t node = order_X[i] / num_experts, e = order_X[i] % num_experts;
            if (wanted_NE(node, e) == 0 || home_E[e] / ranks_per_node == node) continue;
            wish_X(num_wishes++) = {static_cast<int32_t>(node), static_cast<int32_t>(e)};
        }
    }
};

// What each node hosts: its homes, and what its tokens want most; at most `most_copies` other nodes host the experts of
// one home rank.
void choose_hosted(const Trial &trial, int64_t slots, double most_copies) {
    const auto [num_nodes, num_experts] = trial.hosted_NE.shape;
    const int64_t ranks_per_node = trial.ranks_per_node;
    // The slots kept back are for parts of experts that are too large for one rank: a slot for each rank but one, and a
    // quarter of all at most (chosen by hand).
    const int64_t guests = slots * ranks_per_node - min(ranks_per_node - 1, slots * ranks_per_node / 4);
    Scratch<int64_t, 1> free_N(num_nodes), copies_G(num_nodes * ranks_per_node);
    trial.hosted_NE.fill(false);
    free_N.fill(guests);
    for (int64_t e = 0; e < num_experts; ++e) trial.hosted_NE(trial.home_E[e] / ranks_per_node, e) = true;
    for (int64_t i = 0; i < trial.num_wishes; ++i) {
        const auto [node, e] = trial.wish_X[i];
        const int64_t home = trial.home_E[e];
        if (free_N[node] == 0 || static_cast<double>(copies_G[home]) >= most_copies) continue;
        trial.hosted_NE(node, e) = true;
        free_N(node) -= 1;
        copies_G(home) += 1;
    }
}

// The rank of a node, from `begin` to before `end`, that takes a replica of an expert: the one with least to do.
int64_t best_rank(const Trial &trial, int64_t e, int64_t begin, int64_t end, int64_t slots,
                  const Array<int64_t, 1> &used_G) {
    int64_t best = NONE, least = trial.target;
    for (int64_t rank = begin; rank < end; ++rank) {
        if (used_G[rank - begin] >= slots || trial.served_EG(e, rank) != 0 || rank == trial.home_E[e]) continue;
        // a rank that holds the expert and is not full goes before all others
        const bool is_held = trial.holds_EG(e, rank) && trial.load_G[rank] < trial.target;
        const int64_t load = trial.load_G[rank] - (is_held ? trial.target : 0);
        if (load < least) best = rank, least = load;
    }
    return best;
}

// Lay a node's experts on its ranks. What found no place stays in `left_NE`.
void lay_on_ranks(const Trial &trial, int64_t node, int64_t slots) {
    const int64_t num_experts = trial.home_E.length(), target = trial.target;
    const int64_t begin = node * trial.ranks_per_node, end = begin + trial.ranks_per_node;
    const Array<int64_t, 1> left_E = trial.left_NE[node], &load_G = trial.load_G;
    for (int64_t e = 0; e < num_experts; ++e) {
        const int64_t home = trial.home_E[e];
        if (home < begin || home >= end) continue;
        trial.served_EG(e, home) += static_cast<int32_t>(left_E[e]);
        load_G(home) += left_E[e];
        left_E(e) = 0;
    }
    for (int64_t rank = begin; rank < end; ++rank) {
        // Each turn takes the rank to the target, or all of one expert away from it.
        while (load_G[rank] > target) {  // cut the largest home expert
            int64_t largest = 0;
            for (int64_t e = 1; e < num_experts; ++e)
                if (trial.served_EG(e, rank) > trial.served_EG(largest, rank)) largest = e;
            int32_t &served = trial.served_EG(largest, rank);
            const int64_t amount = min<int64_t>(served, load_G[rank] - target);
            served -= static_cast<int32_t>(amount);
            load_G(rank) -= amount;
            left_E(largest) += amount;
        }
    }
    // Invariant: no rank that takes a replica is above the target or takes more than `slots`.
    Scratch<int64_t, 1> used_G(trial.ranks_per_node), order_X(num_experts);
    int64_t count = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
        if (left_E[e] == 0) continue;
        int64_t i = count++;  // a node has few that are not at home: each is put behind those with as much
        for (; i > 0 && left_E[order_X[i - 1]] < left_E[e]; --i) order_X(i) = order_X[i - 1];
        order_X(i) = e;
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t e = order_X[i];
        while (left_E[e] > 0) {
            const int64_t best = best_rank(trial, e, begin, end, slots, used_G);
            if (best == NONE) break;
            const int64_t amount = min(left_E[e], target - load_G[best]);
            trial.served_EG(e, best) = static_cast<int32_t>(amount);
            load_G(best) += amount;
            used_G(best - begin) += 1;
            left_E(e) -= amount;
        }
    }
}

// What each rank serves of each expert, where nodes host `hosted_NE`. No rank takes more than `slots` replicas, nor,
// where this construction finds a way to, more than the target.
void serve_locally(const Trial &trial, int64_t slots) {
    trial.served_EG.fill(0);
    trial.load_G.fill(0);
    quotas(trial.demand_NE, trial.hosted_NE, trial.left_NE);
    for (int64_t node = 0; node < trial.left_NE.length(); ++node) lay_on_ranks(trial, node, slots);
    for (int64_t node = 0; node < trial.left_NE.length(); ++node)
        for (int64_t e = 0; e < trial.home_E.length(); ++e)
            trial.served_EG(e, trial.home_E[e]) += static_cast<int32_t>(trial.left_NE(node, e));
}

// The slot of an expert on rank g, and whether it must be fetched there. What is held stays in its slot. Others take
// empty slots, then those whose expert is worth least to the node.
int64_t take_slot(const Trial &trial, int64_t g, int64_t e, const Array<double, 1> &worth_S, bool &is_fetched) {
    int64_t slot = NONE;
    for (int64_t s = 0; s < worth_S.length(); ++s)
        if (trial.held_GS(g, s) == e) slot = s;
    is_fetched = slot == NONE;
    if (!is_fetched) return slot;
    slot = 0;
    for (int64_t s = 1; s < worth_S.length(); ++s)
        if (worth_S[s] < worth_S[slot]) slot = s;
    worth_S(slot) = INFINITY;
    return slot;
}

// Write the replicas of a trial into `made`; returns how many.
int64_t make_plan(const Trial &trial, const CellPlan &made) {
    const auto [num_experts, num_ranks] = trial.counts_EG.shape;
    Scratch<double, 2> worth_GS(num_ranks, trial.held_GS.shape[1]);
    for (int64_t g = 0; g < num_ranks; ++g)
        for (int64_t s = 0; s < worth_GS.shape[1]; ++s) {
            const int64_t e = trial.held_GS(g, s);
            // of an expert that is held twice the last slot is used, and the others are as good as empty
            bool is_spare = e == NONE;
            for (int64_t later = s + 1; later < worth_GS.shape[1]; ++later) is_spare |= trial.held_GS(g, later) == e;
            worth_GS(g, s) = is_spare                     ? -1.0
                             : trial.served_EG(e, g) > 0 ? INFINITY
                                                         : trial.worth_NE(g / trial.ranks_per_node, e);
        }
    Scratch<int64_t, 1> left_G(num_ranks), home_G(num_ranks), quota_V(num_ranks);
    int64_t end = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
        const int64_t first = end, home = trial.home_E[e];
        for (int64_t g = 0; g < num_ranks; ++g) {
            left_G(g) = trial.counts_EG(e, g);
            if (trial.served_EG(e, g) == 0 || g == home) continue;
            made.expert_R(end) = static_cast<int16_t>(e);
            made.rank_R(end) = static_cast<int16_t>(g);
            made.slot_R(end) = static_cast<int16_t>(take_slot(trial, g, e, worth_GS[g], made.fetched_R(end)));
            made.tokens_RG[end].fill(0);
            quota_V(end - first) = trial.served_EG(e, g);
            ++end;
        }
        const int64_t home_quota = trial.served_EG(e, home);
        if (end > first)
            split_expert({made.rank_R, made.tokens_RG, first, end, home, home_quota, trial.ranks_per_node}, quota_V,
                         left_G, home_G, true);
    }
    return end;
}

}  // namespace traffic

// Write the replicas of the best plan found into `found`; returns how many, or NONE where the cell should stay.
LOOP int64_t replicate_for_traffic(const CellPlan &cell, const Array<const int32_t, 2> &counts_GE,
                                   const Array<const double, 2> &wanted_NE, const Array<const double, 2> &worth_NE,
                                   const Array<const int64_t, 1> &order_X, const Array<const int16_t, 2> &held_GS,
                                   int64_t target, const Array<const double, 1> &limits,
                                   const Array<const double, 1> &attention_2, const costs::Prices &prices,
                                   const CellPlan &found) {
    using namespace traffic;
    const Trial trial(cell, counts_GE, held_GS, wanted_NE, order_X, worth_NE, prices.ranks_per_node, target);
    const costs::AtHome at_home(cell.home_E, counts_GE);
    const int64_t room = found.expert_R.length();
    const Scratch<int16_t, 1> expert_R(room), rank_R(room), slot_R(room);
    const Scratch<bool, 1> fetched_R(room);
    const Scratch<int32_t, 2> tokens_RG(room, counts_GE.length());
    const CellPlan made = {cell.home_E, expert_R, rank_R, slot_R, fetched_R, tokens_RG};
    int64_t num_found = NONE, fewest = cell.expert_R.length();
    double least_s = costs::cell_seconds(cell, at_home, attention_2, prices).sum() * (1 - WORTH);
    for (int64_t i = 0; i < limits.length(); ++i) {
        // as many replicas as fit, then a quarter fewer each time, as long as that takes no more time
        double last_s = INFINITY;
        for (int64_t few = held_GS.shape[1]; few > 0; few = few * 3 / 4) {
            choose_hosted(trial, few, limits[i] * static_cast<double>(few));
            serve_locally(trial, few);
            const CellPlan other = made.rows(0, make_plan(trial, made));
            const double seconds = costs::cell_seconds(other, at_home, attention_2, prices).sum();
            const int64_t num_replicas = other.expert_R.length();
            if (seconds < least_s || (num_replicas < fewest && seconds < least_s * (1 + WORTH))) {
                num_found = fewest = num_replicas;
                const CellPlan kept = found.rows(0, num_found);
                kept.expert_R.copy(other.expert_R);
                kept.rank_R.copy(other.rank_R);
                kept.slot_R.copy(other.slot_R);
                kept.fetched_R.copy(other.fetched_R);
                kept.tokens_RG.copy(other.tokens_RG);
            }
            least_s = min(least_s, seconds);
            if (seconds > last_s * (1 + WORTH)) break;
            last_s = min(last_s, seconds);
        }
    }
    return num_found;
}

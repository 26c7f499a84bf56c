// The state of one cell while replicas are searched for it.
//
// Host e < E is the home of expert e; host E + p is the redundant slot p, which is slot p % S of rank p / S and holds one
// expert or none. H = E + G * S hosts. The quota of a host is the number of assignments that it serves. G ranks, N
// nodes, E experts, S slots of a rank, M micro-steps, L layers.
//
// Invariants between calls: the quotas of an expert's hosts add up to its demand; `load_G` is the sum of the quotas on
// each rank; a chain `next` from each home visits exactly the slots that hold the expert.
#pragma once

#include "kernels.hpp"

namespace search {

// Micro-steps that a replica's use is foreseen, and what each counts by the one before: at the end of the window less
// than a fifth (0.9 ** 16 = 0.185). Neither value is published.
constexpr int64_t LOOKAHEAD = 16;
constexpr double LOOKAHEAD_DECAY = 0.9;

// A cell has fewer assignments than int32 holds.
struct Host {
    int32_t rank, node;
    int32_t expert;  // NONE for an empty slot
    int32_t held;    // what a slot holds when the cell begins, which is not fetched
    int32_t quota;
    int32_t next;  // the next host of the same expert, NONE behind the last one; chains begin at the home
    int32_t best_expert, best_quota;  // in the best plan found so far
};

// Scratch of the graph searches for one rank.
struct Visit {
    int64_t seen;                     // the number of the last search that saw the rank
    int64_t width;                    // how much load can reach it ...
    int32_t before;                   // the rank before it, in a search for circles
    int32_t from_host, to_host;       // ... over the last edge of the path to it
    int32_t queue;                    // at position i, the rank that the search saw as number i
    int32_t back_queue;               // the same of the last search backwards
    int64_t back_width;               // how much load can go on from it
};

// What the assignments of later micro-steps say about a replica.
struct Later {
    Array<const int32_t, 3> demand_LEM;   // assignments of each expert
    Array<const int32_t, 3> surplus_LGM;  // what ranks have at home above the mean
};

struct Cell {
    const int64_t num_ranks, num_experts, slots, ranks_per_node, num_nodes, num_hosts;
    const bool persistent;  // whether slots keep what they hold. Otherwise they are empty at every cell.
    const Later &later;
    int64_t micro_step = 0, layer = 0;
    uint64_t random = 0;  // state of the random numbers
    int64_t clock = 0;    // the number of the last search; marks of earlier searches are stale without being cleared

    Scratch<Host, 1> hosts;
    Scratch<int32_t, 2> host_GK;  // [G, E / G + S], the hosts on each rank, those at home first
    Scratch<int64_t, 1> load_G;
    Scratch<int32_t, 1> node_G;
    Scratch<int32_t, 2> demand_NE;  // assignments of each expert that come from each node
    Scratch<Visit, 1> visits;       // of ranks
    Scratch<int64_t, 1> seen_E;     // the number of the last search that passed the expert
    Scratch<int64_t, 2> split_3G;   // of one expert: tokens of each rank without a host yet, those that the home
                                    // serves, and the quotas of its replicas

    Cell(int64_t ranks, int64_t experts, int64_t slots, int64_t ranks_per_node, bool persistent, const Later &later)
        : num_ranks(ranks), num_experts(experts), slots(slots), ranks_per_node(ranks_per_node),
          num_nodes(ranks / ranks_per_node), num_hosts(experts + ranks * slots), persistent(persistent), later(later),
          hosts(num_hosts), host_GK(ranks, experts / ranks + slots), load_G(ranks), node_G(ranks),
          demand_NE(num_nodes, experts), visits(ranks), seen_E(experts), split_3G(3, ranks) {
        for (int64_t g = 0; g < ranks; ++g) node_G(g) = static_cast<int32_t>(g / ranks_per_node);
        for (int64_t x = experts; x < num_hosts; ++x) {
            const int64_t rank = (x - experts) / slots;
            hosts(x).rank = static_cast<int32_t>(rank);
            hosts(x).node = node_G(rank);
            host_GK(rank, experts / ranks + (x - experts) % slots) = static_cast<int32_t>(x);
        }
        for (int64_t e = 0; e < experts; ++e) hosts(e).expert = static_cast<int32_t>(e);
    }

    int64_t first_slot(int64_t rank) const { return num_experts + rank * slots; }
};

// Bring chains and loads in line with what the slots hold and with the quotas.
inline void relink(Cell &cell) {
    cell.load_G.fill(0);
    for (int64_t e = 0; e < cell.num_experts; ++e) {
        cell.load_G(cell.hosts(e).rank) += cell.hosts(e).quota;
        cell.hosts(e).next = NONE;
    }
    for (int64_t x = cell.num_experts; x < cell.num_hosts; ++x) {
        Host &slot = cell.hosts(x);
        if (slot.expert == NONE) continue;
        cell.load_G(slot.rank) += slot.quota;
        slot.next = cell.hosts(slot.expert).next;  // behind the home, which stays first
        cell.hosts(slot.expert).next = static_cast<int32_t>(x);
    }
}

// Take up homes, what slots hold, and counts, of which the sum is returned; every expert is served at home.
inline int64_t begin_cell(Cell &cell, const Array<const int32_t, 2> &counts_GE, const Array<int16_t, 1> &home_E,
                          const Array<int32_t, 1> &held_H) {
    cell.demand_NE.fill(0);
    for (int64_t g = 0; g < cell.num_ranks; ++g) {
        cell.visits(g).queue = 0;  // homes of the rank so far
        const auto demand_E = cell.demand_NE[cell.node_G(g)];
        const auto counts_E = counts_GE[g];
        for (int64_t e = 0; e < cell.num_experts; ++e) demand_E(e) += counts_E(e);
    }
    int64_t total = 0;
    for (int64_t e = 0; e < cell.num_experts; ++e) {
        int32_t demand = 0;
        for (int64_t n = 0; n < cell.num_nodes; ++n) demand += cell.demand_NE(n, e);
        total += demand;
        cell.hosts(e).rank = home_E(e);
        cell.hosts(e).node = cell.node_G(home_E(e));
        cell.hosts(e).quota = demand;
        cell.host_GK(home_E(e), cell.visits(home_E(e)).queue++) = static_cast<int32_t>(e);
    }
    for (int64_t x = cell.num_experts; x < cell.num_hosts; ++x) {
        // `expert` is what a slot offers as a host, `held` what it costs nothing to use. A second slot of a rank with
        // the same expert offers nothing.
        Host &slot = cell.hosts(x);
        slot.held = slot.expert = held_H(x);
        slot.quota = 0;
        for (int64_t other = cell.first_slot(slot.rank); other < x; ++other)
            if (cell.hosts(other).expert == slot.held) slot.expert = NONE;
    }
    relink(cell);
    return total;
}

// Let an empty slot hold an expert.
inline void put(Cell &cell, int64_t host, int32_t expert) {
    cell.hosts(host).expert = expert;
    cell.hosts(host).next = cell.hosts(expert).next;
    cell.hosts(expert).next = static_cast<int32_t>(host);
}

// Empty a slot. What it served goes home.
inline void clear(Cell &cell, int64_t host) {
    Host &slot = cell.hosts(host), &home = cell.hosts(slot.expert);
    home.quota += slot.quota;
    cell.load_G(home.rank) += slot.quota;
    cell.load_G(slot.rank) -= slot.quota;
    slot.quota = 0;
    Host *before = &home;
    while (before->next != host) before = &cell.hosts(before->next);
    before->next = slot.next;
    slot.expert = NONE;
}

// Let slots that serve nothing offer what they held when the cell began, so that quota may move there for free.
inline void restore_held(Cell &cell) {
    for (int64_t x = cell.num_experts; x < cell.num_hosts; ++x) {
        const Host &slot = cell.hosts(x);
        if (slot.quota != 0 || slot.expert == slot.held) continue;
        if (slot.expert != NONE) clear(cell, x);
        // An (expert, rank) pair is one host at most: not where the rank is its home, or another slot serves it.
        bool is_served = slot.held == NONE || cell.hosts(slot.held).rank == slot.rank;
        const int64_t first = cell.first_slot(slot.rank);
        for (int64_t other = first; other < first + cell.slots; ++other)
            is_served |= cell.hosts(other).expert == slot.held;
        if (!is_served) put(cell, x, slot.held);
    }
}

// How much a replica could serve in the next micro-steps, sooner ones counting more.
inline double later_use(const Cell &cell, int64_t expert, int64_t rank) {
    const auto demand_M = cell.later.demand_LEM[cell.layer][expert];
    const auto surplus_M = cell.later.surplus_LGM[cell.layer][cell.hosts(expert).rank];
    const auto surplus_of_rank_M = cell.later.surplus_LGM[cell.layer][rank];
    const int64_t begin = cell.micro_step + 1, end = min(begin + LOOKAHEAD, demand_M.length());
    double worth = 0.0, weight = 1.0;
    for (int64_t m = begin; m < end; ++m) {
        weight *= LOOKAHEAD_DECAY;
        // As if every expert were served at home: what the home has too much, as far as the rank has too little.
        const int32_t moved = min(surplus_M(m), -surplus_of_rank_M(m));
        worth += weight * max(min(demand_M(m), moved), 0);
    }
    return worth;
}

// The rank with the largest load, the first of several.
inline int64_t heaviest(const Cell &cell) {
    int64_t best = 0;
    for (int64_t g = 1; g < cell.num_ranks; ++g)
        if (cell.load_G(g) > cell.load_G(best)) best = g;
    return best;
}

}  // namespace search

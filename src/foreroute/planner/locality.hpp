// Tokens that stay in their node: quotas move between the hosts of an expert at no cost in balance.
//
// A move takes assignments of one expert from its host on rank a to its host on rank b; for each of them +1, 0 or -1
// tokens more stay in their node. Balance is kept by moves in a circle of ranks, each of which gives as much as it gets.
// A rank may also come to serve less, and more up to the target; so one more vertex, the slack, takes from any rank and
// gives to ranks below the target. Circles of positive gain are found as Bellman and Ford do, and emptied, until there
// are none: then no moves keep more tokens in their node (a circulation of largest gain).
#pragma once

#include "planner/cell.hpp"

namespace search {

// The three values are chosen by hand. What is said of others was seen on G64 with slots that persist, at 4 layers.
//
// Amounts below this part of the target are not worth a circle: half a percent of a rank's load. 48 leaves 0.4 points
// more there, and planning takes 0.75 of the time; 768 leaves 0.1 fewer and takes 1.16.
constexpr int64_t FINEST = 192;
// Most searches for circles, and passes over the edges in each. Both only bound the time: a search that finds nothing is
// the last. What is left undone costs locality, not balance. 8 sweeps keep up to 0.4 points more tokens in their node,
// and planning takes 1.3 times as long; 2 sweeps of 24 searches leave 0.9 to 1.9 more that cross, in 0.7 of the time.
constexpr int64_t ROUNDS = 1;

struct Bounds {
    int64_t target;  // what no rank is to serve more than
    int64_t least;   // the smallest amount that is worth a circle
};

// Let slots serve experts of overloaded homes that they hold, as far as tokens come from the slot's node.
//
// The search for replicas would take any slot that holds one, and leave it to `keep_local` to find out which is near.
inline void serve_near(Cell &cell, int64_t target) {
    for (int64_t x = cell.num_experts; x < cell.num_hosts; ++x) {
        Host &slot = cell.hosts(x);
        if (slot.expert == NONE) continue;
        Host &home = cell.hosts(slot.expert);
        const int64_t node = slot.node;
        if (home.node == node) continue;
        int64_t near = cell.demand_NE(node, slot.expert);
        for (int32_t y = home.next; y != NONE; y = cell.hosts(y).next)
            if (cell.hosts(y).node == node) near -= cell.hosts(y).quota;
        const int64_t room = min(cell.load_G(home.rank) - target, target - cell.load_G(slot.rank));
        const int64_t amount = min(min<int64_t>(near, home.quota), room);
        if (amount <= 0) continue;
        home.quota -= static_cast<int32_t>(amount);
        slot.quota += static_cast<int32_t>(amount);
        cell.load_G(home.rank) -= amount;
        cell.load_G(slot.rank) += amount;
    }
}

// By how much the hosts of an expert in a node serve more than the node's own tokens: `over_NE`.
inline void measure(Cell &cell) {
    for (int64_t e = 0; e < cell.num_experts; ++e) {
        if (cell.hosts(e).next == NONE) continue;
        for (int64_t n = 0; n < cell.num_nodes; ++n) cell.over_NE(n, e) = -cell.demand_NE(n, e);
        for (int64_t x = e; x != NONE; x = cell.hosts(x).next)
            cell.over_NE(cell.hosts(x).node, e) += cell.hosts(x).quota;
    }
}

struct Edge {
    int64_t gain;   // tokens more in their node, for each assignment that moves
    int64_t width;  // how many of them have this gain
};

// What a move from host x to host y of the same expert gains.
inline Edge edge(const Cell &cell, int64_t x, int64_t y) {
    const int64_t e = cell.hosts(x).expert;
    const int64_t near = cell.hosts(x).node, far = cell.hosts(y).node;
    Edge found = {0, cell.hosts(x).quota};
    if (near == far) return found;
    const int64_t over = cell.over_NE(near, e), under = -cell.over_NE(far, e);
    if (over > 0) {
        found.width = min(found.width, over);
    } else {
        found.gain -= 1;
    }
    if (under > 0) {
        found.width = min(found.width, under);
        found.gain += 1;
    }
    return found;
}

// Move `amount` of an expert from host x to host y.
inline void shift(Cell &cell, int64_t x, int64_t y, int64_t amount) {
    Host &from = cell.hosts(x), &to = cell.hosts(y);
    const int32_t moved = static_cast<int32_t>(amount);
    from.quota -= moved;
    to.quota += moved;
    cell.over_NE(from.node, from.expert) -= moved;
    cell.over_NE(to.node, from.expert) += moved;
}

// Find a circle through `start` that gains, and send around it what every edge takes; False where there is none.
inline bool improve(Cell &cell, int64_t start, const Bounds &bounds) {
    const int64_t now = ++cell.clock;
    int64_t count = 0, found = NONE;
    const auto reach = [&](int32_t x, int32_t y, int64_t width) {
        const int32_t to = cell.hosts(y).rank;
        Visit &visit = cell.visits(to);
        if (visit.seen == now) return;
        visit.seen = now;
        visit.width = width;
        visit.from_host = x;
        visit.to_host = y;
        cell.visits(count++).queue = to;
        if (found == NONE && (to == start || bounds.target - cell.load_G(to) >= bounds.least)) found = to;
    };
    const auto follow = [&](int64_t rank, int64_t width, int64_t least_gain) {
        const int64_t node = cell.node_G(rank);
        for (int64_t k = 0; k < cell.host_GK.shape[1] && found == NONE; ++k) {
            const int32_t x = cell.host_GK(rank, k), e = cell.hosts(x).expert;
            if (e == NONE || cell.hosts(x).quota < bounds.least || cell.hosts(e).next == NONE) continue;
            const int64_t over = cell.over_NE(node, e);
            const bool spare = over >= bounds.least;
            if (least_gain > 0 && !spare) continue;
            const int64_t most = min<int64_t>(width, cell.hosts(x).quota);
            for (int32_t y = e; y != NONE && found == NONE; y = cell.hosts(y).next) {
                if (y == x) continue;
                const int64_t far = cell.hosts(y).node;
                if (far == node) {
                    if (least_gain == 0) reach(x, y, most);
                    continue;
                }
                const int64_t under = -cell.over_NE(far, e);
                const bool wanted = under >= bounds.least;
                if (wanted + spare < 1 + least_gain) continue;
                int64_t w = most;
                if (spare) w = min(w, over);
                if (wanted) w = min(w, under);
                reach(x, y, w);
            }
        }
    };
    follow(start, bounds.target, 1);
    for (int64_t i = 0; i < count && found == NONE; ++i) {
        const int64_t rank = cell.visits(i).queue;
        follow(rank, cell.visits(rank).width, 0);
    }
    if (found == NONE) return false;
    int64_t amount = cell.visits(found).width, at = found;
    if (found != start) {
        amount = min(amount, bounds.target - cell.load_G(found));
        cell.load_G(found) += amount;
        cell.load_G(start) -= amount;
    }
    do {
        const Visit &visit = cell.visits(at);
        at = cell.hosts(visit.from_host).rank;
        shift(cell, visit.from_host, visit.to_host, amount);
    } while (at != start);
    return true;
}

// Move quota so that more tokens stay in their node while no rank comes above the target.
inline void keep_local(Cell &cell, int64_t target) {
    if (cell.num_nodes == 1) return;
    measure(cell);
    const Bounds bounds = {target, 1 + target / FINEST};
    for (int64_t round = 0; round < ROUNDS; ++round) {
        bool any = false;
        for (int64_t rank = 0; rank < cell.num_ranks; ++rank)
            for (int64_t i = 0; i < 20 && improve(cell, rank, bounds); ++i) any = true;
        if (!any) return;
    }
}

}  // namespace search

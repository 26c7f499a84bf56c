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
constexpr int64_t SEARCHES = 12, SWEEPS = 4;

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
        const int64_t node = cell.node_of(slot.rank);
        if (cell.node_of(home.rank) == node) continue;
        int64_t near = cell.demand_NE(node, slot.expert);
        for (int32_t y = home.next; y != NONE; y = cell.hosts(y).next)
            if (cell.node_of(cell.hosts(y).rank) == node) near -= cell.hosts(y).quota;
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
            cell.over_NE(cell.node_of(cell.hosts(x).rank), e) += cell.hosts(x).quota;
    }
}

struct Edge {
    int64_t gain;   // tokens more in their node, for each assignment that moves
    int64_t width;  // how many of them have this gain
};

// What a move from host x to host y of the same expert gains.
inline Edge edge(const Cell &cell, int64_t x, int64_t y) {
    const int64_t e = cell.hosts(x).expert;
    const int64_t near = cell.node_of(cell.hosts(x).rank), far = cell.node_of(cell.hosts(y).rank);
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

// Send as much around the circle through `start` as every edge takes, if it gains still, and cut the circle.
inline bool send(Cell &cell, int64_t start, const Bounds &bounds) {
    const int64_t slack = cell.num_ranks;
    int64_t amount = bounds.target, total = 0, at = start;
    do {
        const int64_t before = cell.visits(at).before;
        if (at == slack) {
            amount = min(amount, bounds.target - cell.load_G(before));
        } else if (before != slack) {
            const auto [gain, width] = edge(cell, cell.visits(at).from_host, cell.visits(at).to_host);
            total += gain;
            amount = min(amount, width);
        }
        at = before;
    } while (at != start);
    // Earlier circles have moved quota over the same edges: the gain that was added up along the walk may be gone.
    if (total <= 0 || amount < bounds.least) amount = 0;
    // From a rank to the slack: that rank keeps what it was given. From the slack to a rank: it gives and gets nothing.
    do {
        Visit &visit = cell.visits(at);
        const int64_t before = visit.before;
        if (at == slack) {
            cell.load_G(before) += amount;
        } else if (before == slack) {
            cell.load_G(at) -= amount;
        } else {
            const int32_t moved = static_cast<int32_t>(amount), e = cell.hosts(visit.from_host).expert;
            cell.hosts(visit.from_host).quota -= moved;
            cell.hosts(visit.to_host).quota += moved;
            cell.over_NE(cell.node_of(before), e) -= moved;
            cell.over_NE(cell.node_of(at), e) += moved;
        }
        visit.before = NONE;
        visit.gain = 0;
        at = before;
    } while (at != start);
    return amount > 0;
}

// Let the best walk to `to` come over `vertex`. When that closes a circle, empty it. True when it was emptied.
inline bool extend(Cell &cell, int64_t vertex, int64_t to, int64_t gain, const Bounds &bounds) {
    cell.visits(to).gain = static_cast<int32_t>(gain);
    cell.visits(to).before = static_cast<int32_t>(vertex);
    if (to < cell.num_ranks) cell.visits(to).waiting = 1;
    // The chain of `before` has no circle but one that this edge closes: others were cut when they closed.
    for (int64_t at = vertex; at != NONE; at = cell.visits(at).before)
        if (at == to) return send(cell, to, bounds);
    return false;
}

struct Swept {
    bool changed;  // whether any walk gained more
    bool sent;     // whether a circle was emptied
};

// Follow all edges to longer walks of more gain.
inline Swept relax(Cell &cell, const Bounds &bounds, bool backwards) {
    const int64_t slack = cell.num_ranks;
    Swept swept = {false, false};
    for (int64_t i = 0; i < cell.num_ranks; ++i) {
        const int64_t rank = backwards ? cell.num_ranks - 1 - i : i;
        Visit &visit = cell.visits(rank);
        if (cell.visits(slack).gain > visit.gain) {
            swept.changed = true;
            swept.sent |= extend(cell, slack, rank, cell.visits(slack).gain, bounds);
        }
        if (!visit.waiting) continue;  // no walk to it has gained since its edges were last followed
        visit.waiting = 0;
        for (int64_t k = 0; k < cell.host_GK.shape[1]; ++k) {
            const int32_t x = cell.host_GK(rank, k), e = cell.hosts(x).expert;
            if (e == NONE || cell.hosts(x).quota < bounds.least || cell.hosts(e).next == NONE) continue;
            // One bound for all edges of the expert: leaving a node that has none of it to spare loses one, arriving
            // gains one at most, so a walk reaches `most` + 1. Ranks that have more than `most` are passed over.
            const int64_t most = visit.gain - (cell.over_NE(cell.node_of(rank), e) < bounds.least);
            if (most < 0) continue;
            for (int32_t y = e; y != NONE; y = cell.hosts(y).next) {
                const int64_t to = cell.hosts(y).rank;
                if (y == x || cell.visits(to).gain > most) continue;
                const auto [gain, width] = edge(cell, x, y);
                if (width < bounds.least || visit.gain + gain <= cell.visits(to).gain) continue;
                cell.visits(to).from_host = x;
                cell.visits(to).to_host = y;
                swept.changed = true;
                swept.sent |= extend(cell, rank, to, visit.gain + gain, bounds);
            }
        }
        if (visit.gain > cell.visits(slack).gain && bounds.target - cell.load_G(rank) >= bounds.least) {
            swept.changed = true;
            swept.sent |= extend(cell, rank, slack, visit.gain, bounds);
        }
    }
    return swept;
}

// Move quota so that more tokens stay in their node while no rank comes above the target.
inline void keep_local(Cell &cell, int64_t target) {
    if (cell.num_nodes == 1) return;
    measure(cell);
    // Every circle keeps all quotas' sums by expert and no load above the target, so this may stop after any of them.
    const Bounds bounds = {target, 1 + target / FINEST};
    for (int64_t search = 0; search < SEARCHES; ++search) {
        for (int64_t vertex = 0; vertex <= cell.num_ranks; ++vertex) {  // the slack is vertex G
            Visit &visit = cell.visits(vertex);
            visit.gain = 0;
            visit.before = NONE;
            visit.waiting = 1;
        }
        bool any_sent = false;
        // One sweep carries a gain along ascending ranks as far as it goes, the next along descending ones. For shortest
        // paths that halves the sweeps that may be needed (Yen, 1970).
        for (int64_t sweep = 0; sweep < SWEEPS; ++sweep) {
            const auto [changed, sent] = relax(cell, bounds, sweep % 2 == 1);
            any_sent |= sent;
            if (!changed) break;
        }
        if (!any_sent) return;
    }
}

}  // namespace search

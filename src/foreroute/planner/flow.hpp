// Bringing ranks to a target: quota moves between hosts that exist, then replicas are added where that is not enough.
//
// Load can go from rank a to rank b when an expert with quota on a has a host on b. Ranks that a search from an
// overloaded rank sees without meeting one below the target are one side of a minimum cut: nothing but another replica
// helps them. Searches backward from the ranks below the target say where it could be put: which ranks can take load, or
// pass it on, and have a slot.
#pragma once

#include "planner/cell.hpp"

namespace search {

// Weight of a future reuse of a replica, relative to one assignment that stays in its node now.
// At 0, slots that persist fetch 8 to 34 % more; as said of the values in replicas.cpp.
constexpr double REUSE_WEIGHT = 3.0;

struct Found {
    int64_t end;    // the rank that was searched for, or NONE
    int64_t count;  // ranks seen
};

// Search breadth first from `start` for a rank below the target.
inline Found search_path(Cell &cell, int64_t start, int64_t target) {
    const int64_t now = ++cell.clock;
    cell.visits(start).seen = now;
    cell.visits(start).width = cell.load_G(start) - target;
    cell.visits(0).queue = static_cast<int32_t>(start);
    // Invariant: `queue` of visits[:count] are the ranks seen, each with what its path from `start` can carry.
    // An expert is looked at once: whatever rank it was found on, it leads to the same ranks.
    int64_t count = 1;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t rank = cell.visits(i).queue;
        for (int64_t k = 0; k < cell.host_GK.shape[1]; ++k) {
            const int32_t x = cell.host_GK(rank, k);
            const Host &from = cell.hosts(x);
            // a home without a replica: its load can go nowhere
            if (x < cell.num_experts && from.next == NONE) continue;
            if (from.quota == 0 || cell.seen_E(from.expert) == now) continue;
            cell.seen_E(from.expert) = now;
            for (int32_t y = from.expert; y != NONE; y = cell.hosts(y).next) {
                const int32_t to = cell.hosts(y).rank;
                Visit &visit = cell.visits(to);
                if (visit.seen == now) continue;
                visit.seen = now;
                visit.from_host = x;
                visit.to_host = y;
                visit.width = min<int64_t>(cell.visits(rank).width, from.quota);
                if (cell.load_G(to) < target) return {to, count};
                cell.visits(count++).queue = to;
            }
        }
    }
    return {NONE, count};
}

// Move load along the path that the last search found.
inline void push(Cell &cell, int64_t start, int64_t end, int64_t amount) {
    cell.load_G(start) -= amount;
    cell.load_G(end) += amount;
    // Between both ends what a rank takes it passes on, so its load stays.
    for (int64_t rank = end; rank != start; rank = cell.hosts(cell.visits(rank).from_host).rank) {
        cell.hosts(cell.visits(rank).from_host).quota -= static_cast<int32_t>(amount);
        cell.hosts(cell.visits(rank).to_host).quota += static_cast<int32_t>(amount);
    }
}

inline bool has_free_slot(const Cell &cell, int64_t rank) {
    bool found = false;
    const int64_t first = cell.first_slot(rank);
    for (int64_t x = first; x < first + cell.slots; ++x) found |= cell.hosts(x).quota == 0;
    return found;
}

// Search against the edges from all ranks below the target, first in `back_queue`; `end` counts them, `count` all seen.
inline Found search_back(Cell &cell, int64_t target) {
    const int64_t now = ++cell.clock;
    int64_t count = 0;
    for (int64_t rank = 0; rank < cell.num_ranks; ++rank) {
        if (cell.load_G(rank) >= target) continue;
        cell.visits(rank).back_width = target - cell.load_G(rank);
        cell.visits(rank).seen = now;
        cell.visits(count++).back_queue = static_cast<int32_t>(rank);
    }
    // Invariant: `back_width` of a queued rank can flow from it to a rank below the target over hosts that exist.
    const int64_t num_below = count;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t rank = cell.visits(i).back_queue;
        for (int64_t k = 0; k < cell.host_GK.shape[1]; ++k) {
            const int32_t e = cell.hosts(cell.host_GK(rank, k)).expert;
            if (e == NONE || cell.seen_E(e) == now || cell.hosts(e).next == NONE) continue;
            cell.seen_E(e) = now;
            for (int32_t x = e; x != NONE; x = cell.hosts(x).next) {
                const Host &host = cell.hosts(x);
                Visit &visit = cell.visits(host.rank);
                if (host.quota == 0 || visit.seen == now) continue;
                visit.seen = now;
                visit.back_width = min<int64_t>(cell.visits(rank).back_width, host.quota);
                cell.visits(count++).back_queue = host.rank;
            }
        }
    }
    return {num_below, count};
}

// The most that a rank with a free slot can take, or where there is none, take and pass on, in `back_width`.
inline int64_t receiving_capacity(Cell &cell, int64_t target) {
    // when no rank has a slot for that either, the answer is 0, and `back_width` says what ranks could take with a slot
    int64_t most = 0;
    for (int64_t rank = 0; rank < cell.num_ranks; ++rank) {
        // A rank below the target was not seen by the last search, which would have ended there.
        int64_t capacity = target - cell.load_G(rank);
        if (capacity < 0 || !has_free_slot(cell, rank)) capacity = 0;
        cell.visits(rank).back_width = capacity;
        most = max(most, capacity);
    }
    if (most > 0) return most;
    const auto [num_below, count] = search_back(cell, target);
    for (int64_t i = num_below; i < count; ++i) {
        const int64_t rank = cell.visits(i).back_queue;
        if (has_free_slot(cell, rank)) most = max(most, cell.visits(rank).back_width);
    }
    if (most > 0)
        for (int64_t i = 0; i < count; ++i) {
            const int64_t rank = cell.visits(i).back_queue;
            if (i < num_below || !has_free_slot(cell, rank)) cell.visits(rank).back_width = 0;
        }
    return most;
}

// The most that one expert on one of these ranks can give, by their numbers in the last search.
inline int64_t supply_of(const Cell &cell, int64_t begin, int64_t end) {
    int64_t most = 0;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t rank = cell.visits(i).queue;
        int32_t quota = 0;
        for (int64_t k = 0; k < cell.host_GK.shape[1]; ++k) quota = max(quota, cell.hosts(cell.host_GK(rank, k)).quota);
        most = max(most, min<int64_t>(quota, cell.visits(rank).width));
    }
    return most;
}

struct Choice {
    int64_t host;  // to copy from
    int64_t rank;  // to copy to
};

// The best replica among those that move enough.
inline Choice choose_replica(Cell &cell, int64_t count, int64_t enough, double noise) {
    Choice best = {NONE, NONE};
    double best_score = -1.0e30;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t rank = cell.visits(i).queue;
        if (cell.visits(rank).width < enough) continue;
        for (int64_t k = 0; k < cell.host_GK.shape[1]; ++k) {
            const int64_t x = cell.host_GK(rank, k);
            if (cell.hosts(x).quota < enough) continue;
            const int64_t e = cell.hosts(x).expert;
            for (int64_t u = 0; u < cell.num_ranks; ++u) {
                if (cell.visits(u).back_width < enough) continue;
                // Tokens that come from the rank's node need not cross; a rank with capacity to spare is kept for more,
                // at half the weight (chosen by hand).
                const int64_t local = min<int64_t>(enough, cell.demand_NE(cell.node_G(u), e));
                double score = static_cast<double>(local) - 0.5 * static_cast<double>(cell.visits(u).back_width - enough);
                if (cell.persistent) score += REUSE_WEIGHT * later_use(cell, e, u);
                if (noise > 0.0) score += noise * static_cast<double>(enough) * next_unit(cell.random);
                if (score > best_score) {
                    best = {x, u};
                    best_score = score;
                }
            }
        }
    }
    return best;
}

// A slot of the rank that serves nothing: the one that holds `expert`, an empty one, the least wanted later.
inline int64_t free_slot(const Cell &cell, int64_t rank, int64_t expert) {
    // Slots that serve something are never given away here; `evict` does that.
    int64_t best = NONE;
    double best_worth = 0.0;
    const int64_t first = cell.first_slot(rank);
    for (int64_t x = first; x < first + cell.slots; ++x) {
        if (cell.hosts(x).quota != 0) continue;
        const int64_t held = cell.hosts(x).held;
        if (held == expert && held != NONE) return x;
        // Later use is never negative, so an empty slot goes before any that would lose something.
        const double worth = held == NONE ? -1.0 : later_use(cell, held, rank);
        if (best == NONE || worth < best_worth) {
            best = x;
            best_worth = worth;
        }
    }
    return best;
}

// Add one replica from the seen ranks to another, and use it. What is to be passed on, later searches pass on.
inline bool add_replica(Cell &cell, int64_t start, int64_t count, int64_t target, double threshold, double noise) {
    const int64_t capacity = receiving_capacity(cell, target);
    if (capacity == 0) return false;
    // when the overloaded rank, seen first, has enough, no other has to give
    int64_t supply = supply_of(cell, 0, 1), givers = 1;
    if (supply < capacity) {
        supply = max(supply, supply_of(cell, 1, count));
        givers = count;
    }
    int64_t enough = min(supply, capacity);
    if (threshold < 1.0) enough = max<int64_t>(static_cast<int64_t>(static_cast<double>(enough) * threshold), 1);
    const auto [x, rank] = choose_replica(cell, givers, enough, noise);
    const int32_t expert = cell.hosts(x).expert;
    const int64_t host = free_slot(cell, rank, expert);
    const int64_t given = min<int64_t>(cell.visits(cell.hosts(x).rank).width, cell.hosts(x).quota);
    const int64_t amount = min(given, cell.visits(rank).back_width);
    if (cell.hosts(host).expert != NONE) clear(cell, host);  // it serves nothing
    put(cell, host, expert);
    cell.visits(rank).from_host = static_cast<int32_t>(x);
    cell.visits(rank).to_host = static_cast<int32_t>(host);
    push(cell, start, rank, amount);
    return true;
}

// Empty the slot whose place serves best: what a new replica there can take, less what the old one serves.
inline bool evict(Cell &cell, int64_t count) {
    const int64_t supply = supply_of(cell, 0, count);
    int64_t best = NONE, best_gain = 0;
    for (int64_t rank = 0; rank < cell.num_ranks; ++rank) {
        const int64_t capacity = cell.visits(rank).back_width, first = cell.first_slot(rank);
        if (capacity == 0) continue;
        for (int64_t x = first; x < first + cell.slots; ++x) {
            const int64_t quota = cell.hosts(x).quota, gain = min(supply, capacity + quota) - quota;
            if (gain > best_gain) {
                best = x;
                best_gain = gain;
            }
        }
    }
    if (best == NONE) return false;
    clear(cell, best);
    return true;
}

// Bring every rank to the target, or to the least larger one that is found, which is returned.
//
// A new replica must move the share `threshold` of the most that one can, and chance adds up to the share `noise` of
// this to its score. Without `adding`, the first rank that is stuck above the target ends it.
inline int64_t grow(Cell &cell, int64_t target, bool adding, double threshold, double noise) {
    // Each round moves load below the target, adds a replica, empties a slot or raises the target. A new replica may
    // lift its rank above the target, where that rank can pass load on; then a later round does. Emptied slots may be
    // filled and emptied again, so their number is bounded (by hand).
    int64_t evictions = 2 * cell.num_ranks;
    while (true) {
        const int64_t start = heaviest(cell);
        if (cell.load_G(start) <= target) return target;
        const auto [end, count] = search_path(cell, start, target);
        if (end != NONE) {
            push(cell, start, end, min(cell.visits(end).width, target - cell.load_G(end)));
        } else if (!adding) {
            return cell.load_G(start);
        } else if (add_replica(cell, start, count, target, threshold, noise)) {
            continue;
        } else if (evictions > 0 && evict(cell, count)) {
            --evictions;
        } else {
            // The ranks that were seen serve each other's experts alone: the best for them is their mean.
            int64_t seen = 0;
            for (int64_t i = 0; i < count; ++i) seen += cell.load_G(cell.visits(i).queue);
            target = ceil_div(seen, count);
        }
    }
}

}  // namespace search

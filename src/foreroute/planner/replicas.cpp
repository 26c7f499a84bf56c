// The search for replicas: one call plans a block of micro-steps of some layers, cell by cell in execution order.
//
// A cell is first served at home, then grown: a replica is added across each minimum cut until every rank is at the
// target. A cell that misses the target is grown again from perturbed states; one that reaches it sheds the replicas
// that it can do without. Then its quotas become tokens (split.hpp).
#include "planner/cell.hpp"
#include "planner/flow.hpp"
#include "planner/locality.hpp"
#include "planner/split.hpp"

namespace search {

// None of these values is published. They steer a search whose result is checked against the target, so they decide how
// many replicas and how much time it takes, never whether a plan is right. `benchmarks/planner.py` shows both. What is
// said of other values was seen on the workloads G8 and G32, at 3 layers and 16 micro-steps.
//
// With slots that persist, replicas that move this share of the most that one can move are weighed by their later use.
// At 1, later use breaks ties alone; lower values take more replicas in this cell to spare some in later ones. In steps
// as short as these 1 fetched 1 to 18 % less.
constexpr double REUSE_THRESHOLD = 0.9;
// The search for a cell that misses its target ends after so many attempts that came no nearer: `PATIENCE` / H, as each
// takes longer the more hosts there are, and at least `LEAST_PATIENCE`. With 48, exact cells of 8 ranks with two slots
// come 0.01 to 0.1 % nearer to the mean, in 1.7 to 2 times the time; with 12 they stay 0.03 to 0.4 % farther.
constexpr int64_t PATIENCE = 3000, LEAST_PATIENCE = 20;
// Share of the best state's replicas that an attempt takes out. 0.6 does as well.
constexpr double PERTURBED_SHARE = 0.3;
// An attempt takes replicas that move `1 - THRESHOLD_SPREAD` to 1 of the most that one can move, evenly drawn. With 0.2
// such cells are 1.014 of the mean.
constexpr double THRESHOLD_SPREAD = 0.7;
// Most that chance adds to a replica's score in an attempt, over what it must move. With 0 they are 1.014 too.
constexpr double CHOICE_NOISE = 0.3;
// Attempts at a balanced cell with fewer replicas; each takes half of them out. Without, up to 2 % more are fetched.
constexpr int64_t THINNING_ROUNDS = 6;

// Replicas without which some rank serves more than `most`, which is 1 at least: a lower bound of their number.
int64_t replicas_needed(Cell &cell, int64_t most) {
    for (int64_t g = 0; g < cell.num_ranks; ++g)
        cell.visits(g).back_width = 0;  // replicas that the rank's experts need by themselves
    for (int64_t e = 0; e < cell.num_experts; ++e)
        if (cell.hosts(e).quota > most) cell.visits(cell.hosts(e).rank).back_width += (cell.hosts(e).quota - 1) / most;
    int64_t needed = 0;
    for (int64_t g = 0; g < cell.num_ranks; ++g) {
        int64_t crowded = cell.visits(g).back_width;
        const int64_t over = cell.load_G(g) - most;
        if (over > 0) crowded = max(crowded, ceil_div(over, min(most, cell.visits(g).width)));
        needed += crowded;
    }
    return needed;
}

// Bound what the slowest rank of a cell serves under any plan of these homes and slots, before any is grown.
int64_t least_load(Cell &cell) {
    // If no rank serves more than T, then (1) T is the mean at least, rounded up; (2) a host of an expert serves T of
    // its assignments at most, so that an expert needs ceil(load / T) hosts; (3) what a rank's experts have beyond T
    // goes to replicas, each of which takes T at most, and no more than the heaviest of these experts has. By (2) and
    // (3) every rank's experts need a number of replicas; together they have as many as there are redundant slots. The
    // smallest T that (1) to (3) allow is found by bisection.
    int64_t total = 0, most = 0;
    for (int64_t g = 0; g < cell.num_ranks; ++g) {
        total += cell.load_G(g);
        most = max(most, cell.load_G(g));
        cell.visits(g).width = 0;  // the load of the rank's heaviest expert
    }
    for (int64_t e = 0; e < cell.num_experts; ++e) {
        Visit &visit = cell.visits(cell.hosts(e).rank);
        visit.width = max<int64_t>(visit.width, cell.hosts(e).quota);
    }
    // invariant: `least` - 1 is too little, `most` is enough: with every expert at its home alone
    int64_t least = ceil_div(total, cell.num_ranks);
    while (least < most) {
        const int64_t middle = (least + most) / 2;
        if (replicas_needed(cell, middle) <= cell.num_ranks * cell.slots) {
            most = middle;
        } else {
            least = middle + 1;
        }
    }
    return least;
}

void save_best(Cell &cell) {
    for (int64_t x = 0; x < cell.num_hosts; ++x) {
        cell.hosts(x).best_quota = cell.hosts(x).quota;
        cell.hosts(x).best_expert = cell.hosts(x).expert;
    }
}

void restore_best(Cell &cell) {
    for (int64_t x = 0; x < cell.num_hosts; ++x) {
        cell.hosts(x).quota = cell.hosts(x).best_quota;
        cell.hosts(x).expert = cell.hosts(x).best_expert;
    }
    relink(cell);
}

// Empty the slots that serve less than `least`, and a share of the others, drawn by lot.
void take_out(Cell &cell, int64_t least, double share) {
    for (int64_t x = cell.num_experts; x < cell.num_hosts; ++x) {
        const Host &slot = cell.hosts(x);
        if (slot.expert == NONE) continue;
        if (slot.quota < least || (share > 0.0 && next_unit(cell.random) < share)) clear(cell, x);
    }
}

// How many replicas serve something and were not in their slot when the cell began.
int64_t count_fetched(const Cell &cell) {
    int64_t count = 0;
    for (int64_t x = cell.num_experts; x < cell.num_hosts; ++x)
        count += cell.hosts(x).quota > 0 && cell.hosts(x).held != cell.hosts(x).expert;
    return count;
}

// Grow; where that misses the target, again without replicas in the way, then from perturbed best states.
int64_t attempt(Cell &cell, int64_t target) {
    double threshold = cell.persistent ? REUSE_THRESHOLD : 1.0;
    int64_t best = grow(cell, target, true, threshold, 0.0);
    if (best <= target) return best;
    save_best(cell);
    // The best state is the one with the least target reached; equal ones replace it, so that the search drifts on.
    const int64_t patience = max(PATIENCE / cell.num_hosts, LEAST_PATIENCE);
    int64_t last = 0;
    for (int64_t i = 0; i < last + patience; ++i) {
        // replicas with less than a tenth of a rank's load (chosen by hand) take slots that others need
        if (i == 0) {
            take_out(cell, target / 10, 0.0);
        } else if (i == 1) {  // from empty slots, but for those that serve more than a rank should
            take_out(cell, target + 1, 0.0);
        } else {
            restore_best(cell);
            take_out(cell, 1, PERTURBED_SHARE);
            threshold = 1.0 - THRESHOLD_SPREAD * next_unit(cell.random);
        }
        const int64_t reached = grow(cell, target, true, threshold, CHOICE_NOISE);
        if (reached > best) continue;
        if (reached < best) last = i;
        best = reached;
        save_best(cell);
        if (best <= target) return best;
    }
    restore_best(cell);
    return best;
}

// Split quotas as evenly as the hosts of a cell that misses its target can; returns what was reached.
int64_t even_out(Cell &cell, int64_t target, int64_t reached) {
    save_best(cell);
    while (target < reached) {
        const int64_t middle = (target + reached) / 2;
        if (grow(cell, middle, false, 1.0, 0.0) <= middle) {
            reached = middle;
            save_best(cell);
        } else {
            restore_best(cell);
            target = middle + 1;
        }
    }
    return reached;
}

// Take half of the replicas out and add anew, as long as that needs no more of them.
void thin_out(Cell &cell, int64_t target) {
    save_best(cell);
    int64_t fewest = count_fetched(cell);
    for (int64_t i = 0; i < THINNING_ROUNDS; ++i) {
        take_out(cell, 1, 0.5);
        if (grow(cell, target, true, 1.0, CHOICE_NOISE) <= target && count_fetched(cell) <= fewest) {
            fewest = count_fetched(cell);
            save_best(cell);
        } else {
            restore_best(cell);
        }
    }
}

// Do without the fetched replicas that the others can make up for, those that serve least first.
void drop_spare(Cell &cell, int64_t target) {
    save_best(cell);
    // The best state always reaches the target. Replicas that serve `least` or less were tried and are needed; after a
    // success all are tried again, for quotas have moved.
    int64_t least = 0;
    while (true) {
        int64_t host = NONE;
        for (int64_t x = cell.num_experts; x < cell.num_hosts; ++x) {
            const Host &slot = cell.hosts(x);
            if (slot.best_quota <= least || slot.held == slot.best_expert) continue;
            if (host == NONE || slot.best_quota < cell.hosts(host).best_quota) host = x;
        }
        if (host == NONE) return;
        least = cell.hosts(host).best_quota;
        clear(cell, host);
        if (grow(cell, target, false, 1.0, 0.0) <= target) {
            save_best(cell);
            least = 0;
        } else {
            restore_best(cell);
        }
    }
}

// Bring every rank to the target, or as near as is found, with few fetched replicas.
//
// Returns the target, or the least larger one that was reached.
int64_t find_replicas(Cell &cell, int64_t target, bool tolerant) {
    const int64_t reached = attempt(cell, target);
    restore_held(cell);
    if (reached > target) return even_out(cell, target, reached);
    if (tolerant) {
        // Empty slots cost a fetch for every replica, so fewer are searched for; of kept ones only the fetched cost.
        if (cell.persistent) {
            drop_spare(cell, target);
        } else {
            thin_out(cell, target);
        }
    }
    return reached;
}

// Write the replicas of a cell into `hosts` from row `begin` on; returns the row behind the last. Quotas of experts with
// replicas are used up.
int64_t split(Cell &cell, const Array<const int32_t, 2> &counts_GE, const Hosts &hosts, int64_t begin, bool local) {
    const auto left_G = cell.split_3G[0], home_G = cell.split_3G[1], quota_V = cell.split_3G[2];
    int64_t end = begin;
    for (int64_t e = 0; e < cell.num_experts; ++e) {
        const int64_t first = end;
        for (int32_t x = cell.hosts(e).next; x != NONE; x = cell.hosts(x).next) {
            const Host &slot = cell.hosts(x);
            if (slot.quota == 0) continue;
            hosts.expert_R(end) = static_cast<int16_t>(e);
            hosts.rank_R(end) = static_cast<int16_t>(slot.rank);
            hosts.slot_R(end) = static_cast<int16_t>((x - cell.num_experts) % cell.slots);
            hosts.fetched_R(end) = slot.held != e;
            quota_V(end - first) = slot.quota;
            ++end;
        }
        if (end == first) continue;
        hosts.tokens_RG.slice(first, end).fill(0);
        for (int64_t g = 0; g < cell.num_ranks; ++g) left_G(g) = counts_GE(g, e);
        const Host &home = cell.hosts(e);
        split_expert({hosts.rank_R, hosts.tokens_RG, first, end, home.rank, home.quota, cell.ranks_per_node}, quota_V,
                     left_G, home_G, local);
    }
    return end;
}

// The mean and a tolerance, rounded up.
int64_t target_of(int64_t total, double tolerance, int64_t num_ranks) {
    // as Python divides floats and rounds down: by the remainder, which is exact
    const double load = -static_cast<double>(total) * (1.0 + tolerance), ranks = static_cast<double>(num_ranks);
    const double remainder = fmod(load, ranks);
    return -static_cast<int64_t>(rint((load - remainder) / ranks)) + (remainder < 0.0 ? 1 : 0);
}

}  // namespace search

// Plan some cells of a step, micro-steps and layers from the first number to before the second, into `hosts`, which has
// the micro-steps before of the same layers.
//
// `figures_C2` gets what the slowest rank of each cell serves, and serves at least. `held_LH` is what slots hold where
// they are `persistent`.
LOOP void plan_block(const Array<const int32_t, 4> &counts_MLGE, const search::Later &later, const Hosts &hosts,
                     const Array<int64_t, 2> &figures_C2, const Array<int32_t, 2> &held_LH, int64_t first_step,
                     int64_t steps_end, int64_t first_layer, int64_t layers_end, int64_t slots, int64_t ranks_per_node,
                     bool persistent, double tolerance, bool local) {
    using namespace search;
    const int64_t num_layers = layers_end - first_layer;
    Cell cell(counts_MLGE.shape[2], counts_MLGE.shape[3], slots, ranks_per_node, persistent, later);
    Circles circles(cell);
    int64_t c = first_step * num_layers;
    for (int64_t m = first_step; m < steps_end; ++m) {
        for (int64_t layer = first_layer; layer < layers_end; ++layer, ++c) {
            cell.micro_step = m;
            cell.layer = layer;
            // the number of the cell and nothing else, so that plans do not depend on threads and blocks
            cell.random = static_cast<uint64_t>(m * counts_MLGE.shape[1] + layer);
            const auto counts_GE = counts_MLGE[m][layer];
            const int64_t total = begin_cell(cell, counts_GE, hosts.home_LE[layer - first_layer], held_LH[layer]);
            figures_C2(c, 1) = least_load(cell);
            // what no plan can come below is not searched for
            const int64_t target = max(target_of(total, tolerance, cell.num_ranks), figures_C2(c, 1));
            if (persistent && local) serve_near(cell, target);
            const int64_t reached = find_replicas(cell, target, tolerance > 0.0);
            restore_held(cell);
            if (local) circles.keep_local(reached);
            if (persistent) {
                // A slot that serves nothing was not filled: it still holds what it held.
                for (int64_t x = cell.num_experts; x < cell.num_hosts; ++x)
                    if (cell.hosts(x).quota) held_LH(layer, x) = cell.hosts(x).expert;
            }
            figures_C2(c, 0) = cell.load_G(heaviest(cell));
            hosts.offsets(c + 1) = split(cell, counts_GE, hosts, hosts.offsets(c), local);
        }
    }
}

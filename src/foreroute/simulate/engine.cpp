// When everything happens in recompute or update of one group: the recurrence that engine.py describes.
#include "kernels.hpp"

namespace simulate_engine {

enum Part { ATTENTION, ALL_TO_ALL, EXPERTS, FIXED, EXPOSED, HEAD, PLAN };  // engine.PARTS

struct PassWork {
    Array<const double, 3> attention_MG2;
    Array<const double, 2> head_MG, all_to_all_ML;
    Array<const double, 3> rows_ML2;
    Array<const double, 4> experts_MLG2;
    double layer_s;
    Array<const double, 4> host_KMLG;
    Array<const double, 5> direct_KMLG4;
    Array<const double, 4> gradient_MLG4;
};

struct ExecutionModel {
    double overlap;
    int64_t prefetch;
    bool keeps_slots;
};

struct Cell {
    int64_t way, m, layer;
};

double largest(const Array<const double, 1> &seconds_G) {
    double most = seconds_G[0];
    for (int64_t g = 1; g < seconds_G.length(); ++g) most = max(most, seconds_G[g]);
    return most;
}

void add(const Array<double, 2> &to_G4, const Array<const double, 2> &seconds_G4) {
    for (int64_t g = 0; g < to_G4.length(); ++g) {
        for (int64_t k = 0; k < 4; ++k) to_G4(g, k) += seconds_G4(g, k);
    }
}

// When a link has done this many seconds of work, free for a share `rate` of the phase and for all time after.
double until(double seconds, double phase_s, double rate) {
    if (seconds <= rate * phase_s) return seconds / rate;
    return phase_s + seconds - rate * phase_s;
}

// A group of ranks and the moment that it is at.
struct Group {
    const PassWork &work;
    const ExecutionModel &model;
    int64_t ways, layers, ranks;
    Array<double, 1> parts_X;
    Array<double, 3> fetched_NG2;
    Scratch<double, 2> queued_G4, owed_G4;  // seconds of direct fetches and gradients that links have not carried yet
    Scratch<double, 1> host_G;              // when each copy engine is free
    double clock = 0;
    int64_t fetching = 0, attended = NONE, ended = NONE;  // orders: of the next cell to fetch for, the last that did

    Group(const PassWork &work, const ExecutionModel &model, int64_t ways, const Array<double, 1> &parts_X,
          const Array<double, 3> &fetched_NG2)
        : work(work), model(model), ways(ways), layers(work.all_to_all_ML.shape[1]), ranks(work.head_MG.shape[1]),
          parts_X(parts_X), fetched_NG2(fetched_NG2), queued_G4(ranks, 4), owed_G4(ranks, 4), host_G(ranks) {}

    Cell cell(int64_t order) const {
        int64_t turn = order / layers, k = order % layers, way = turn % ways;
        return {way, turn / ways, way == 1 ? layers - 1 - k : k};
    }

    double largest_of_pass(const Array<const double, 2> &seconds_G2, int side) const {
        double most = seconds_G2(0, side);
        for (int64_t g = 1; g < ranks; ++g) most = max(most, seconds_G2(g, side));
        return most;
    }

    // Let time pass in which the links have `capacity` seconds for fetches, and what is left of it for gradients.
    void elapse(Part part, double seconds, double capacity) {
        clock += seconds;
        parts_X(part) += seconds;
        if (capacity <= 0) return;
        // A rank has four links: out to and in from other nodes, and the same within its node. Fetches go before
        // gradients: a cell waits for the former, only the optimizer for the latter.
        for (int64_t g = 0; g < ranks; ++g) {
            for (int64_t k = 0; k < 4; ++k) {
                double used = min(capacity, queued_G4(g, k));
                queued_G4(g, k) -= used;
                owed_G4(g, k) = max(0.0, owed_G4(g, k) - (capacity - used));
            }
        }
    }

    // Attention and the fixed cost of a pass over a layer; the links are free for a share `rate` of them.
    void attend(double attention_s, double rate) {
        elapse(ATTENTION, attention_s, rate * attention_s);
        elapse(FIXED, work.layer_s, rate * work.layer_s);
    }

    // The slots of a layer are in use until its cell has ended on the way before, back where this is forward.
    int64_t last_use(int64_t order, const Cell &at) const {
        int64_t first = (order / layers - 1) * layers;
        return ways == 1 || at.way == 1 ? first + at.layer : first + layers - 1 - at.layer;
    }

    // Begin all fetches whose time has come.
    void release() {
        for (; fetching < fetched_NG2.length(); ++fetching) {
            // Fetches begin in order: where one must wait, so do all after it.
            if (attended < max<int64_t>(fetching - model.prefetch, 0)) return;
            Cell at = cell(fetching);
            if (model.keeps_slots && fetching >= layers && ended < last_use(fetching, at)) return;
            auto seconds_G = work.host_KMLG[at.way][at.m][at.layer];
            for (int64_t g = 0; g < ranks; ++g) {
                if (seconds_G[g] > 0) {
                    // copies of a rank share one engine, whatever cell they are for
                    double begin = max(host_G[g], clock);
                    host_G(g) = begin + seconds_G[g];
                    fetched_NG2(fetching, g, 0) = begin;
                    fetched_NG2(fetching, g, 1) = begin + seconds_G[g];
                }
            }
            add(queued_G4, work.direct_KMLG4[at.way][at.m][at.layer]);
        }
    }

    // Seconds until the direct fetches of a cell, and of those before it, have all arrived. Links serve cells in
    // order, so what is queued less what was queued for later cells is in front of them.
    double direct_wait(int64_t order, double experts_s, double rate) const {
        double direct_s = 0;
        for (int64_t g = 0; g < ranks; ++g) {
            for (int64_t k = 0; k < 4; ++k) {
                double left = queued_G4(g, k);
                for (int64_t later = order + 1; later < fetching; ++later) {
                    Cell at = cell(later);
                    left -= work.direct_KMLG4(at.way, at.m, at.layer, g, k);
                }
                // Adding the same seconds and taking them off again leaves a rounding error of this size.
                if (left > 1e-15) direct_s = max(direct_s, until(left, experts_s, rate));
            }
        }
        return direct_s;
    }

    // Seconds that the experts of the first pass take longer, since they wait for what is fetched for them.
    double exposed(int64_t order, double experts_s, double rate) const {
        Cell at = cell(order);
        double direct_s = direct_wait(order, experts_s, rate), longest = 0;
        for (int64_t g = 0; g < ranks; ++g) {
            // a rank that does little may wait long without delaying the others
            double wait_s = max(direct_s, fetched_NG2(order, g, 1) - clock);
            longest = max(longest, wait_s + work.experts_MLG2(at.m, at.layer, g, 0));
        }
        return longest - experts_s;
    }

    // One pass over one cell.
    void pass_cell(int64_t order, bool is_first, bool is_backward) {
        Cell at = cell(order);
        double attention_s = largest_of_pass(work.attention_MG2[at.m], is_backward);
        double experts_s = largest_of_pass(work.experts_MLG2[at.m][at.layer], is_backward);
        // What is hidden shortens both all-to-alls alike, and takes the links from fetches while the ranks compute.
        double whole_s = work.all_to_all_ML(at.m, at.layer);
        double hidden = min(2 * whole_s, model.overlap * (attention_s + experts_s));
        double all_to_all_s = whole_s - hidden / 2;
        double computing = attention_s + experts_s + work.layer_s;
        // hidden all-to-alls take the links for their whole time, spread evenly over the computing
        double rate = computing > 0 ? 1 - hidden / computing : 1.0;
        if (is_backward) {
            elapse(ALL_TO_ALL, all_to_all_s, 0);
            elapse(EXPERTS, experts_s, rate * experts_s);
            // from here the weights' gradients are known, and may leave while all else goes on
            add(owed_G4, work.gradient_MLG4[at.m][at.layer]);
            elapse(ALL_TO_ALL, all_to_all_s, 0);
            attend(attention_s, rate);
            return;
        }
        attend(attention_s, rate);
        if (is_first) {
            attended = order;
            release();
        }
        elapse(ALL_TO_ALL, all_to_all_s, 0);
        double exposed_s = is_first ? exposed(order, experts_s, rate) : 0;
        elapse(EXPERTS, experts_s, rate * experts_s);
        elapse(EXPOSED, exposed_s, exposed_s);
        elapse(ALL_TO_ALL, all_to_all_s, 0);
    }

    // What links still have to carry when the last pass has ended is hidden by nothing.
    void wait_for_links() {
        double tail = 0;
        for (int64_t g = 0; g < ranks; ++g) {
            for (int64_t k = 0; k < 4; ++k) tail = max(tail, queued_G4(g, k) + owed_G4(g, k));
        }
        parts_X(EXPOSED) += tail;
        clock += tail;
    }
};

}  // namespace simulate_engine

// Go through all cells. `passes_KF`: forward and backward passes over each cell, on the way forward and back.
LOOP double run_group(const Array<const int64_t, 2> &passes_KF, double ready_s,
                      const simulate_engine::PassWork &work, const simulate_engine::ExecutionModel &model,
                      const Array<double, 1> &parts_X, const Array<double, 3> &fetched_NG2) {
    using namespace simulate_engine;
    Group group(work, model, passes_KF.length(), parts_X, fetched_NG2);
    int64_t order = 0;
    group.elapse(PLAN, ready_s, ready_s);
    for (int64_t m = 0; m < work.all_to_all_ML.length(); ++m) {
        double head_s = largest(work.head_MG[m]);
        for (int64_t way = 0; way < group.ways; ++way) {
            int64_t forwards = passes_KF(way, 0), passes = forwards + passes_KF(way, 1);
            if (way == 1) group.elapse(HEAD, 2 * head_s, 2 * head_s);
            for (int64_t k = 0; k < group.layers; ++k, ++order) {
                // the way back of an update runs every cell forward anew, then backward: activations were not kept
                for (int64_t i = 0; i < passes; ++i) group.pass_cell(order, i == 0, i >= forwards);
                group.ended = order;
                group.release();
            }
            if (way == 0) group.elapse(HEAD, head_s, head_s);
        }
    }
    group.wait_for_links();
    return group.clock;
}

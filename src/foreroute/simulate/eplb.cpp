// Copies of experts, their places, and splits over them, as eplb.py describes them.
#include "kernels.hpp"

namespace simulate_eplb {

// The expert of each copy, one of each expert first; then whatever has the largest load per copy.
void replicate(const Array<const float, 1> &loads_E, const Array<int64_t, 1> &expert_C, const Array<float, 1> &load_C) {
    int64_t experts = loads_E.length();
    Scratch<float, 1> share_E(experts);
    Scratch<int64_t, 1> copies_E(experts);
    for (int64_t e = 0; e < experts; ++e) {
        share_E(e) = loads_E[e];
        copies_E(e) = 1;
        expert_C(e) = e;
    }
    for (int64_t c = experts; c < expert_C.length(); ++c) {
        int64_t most = 0;
        for (int64_t e = 1; e < experts; ++e) {
            if (share_E[e] > share_E[most]) most = e;
        }
        expert_C(c) = most;
        ++copies_E(most);
        share_E(most) = loads_E[most] / static_cast<float>(copies_E[most]);
    }
    for (int64_t c = 0; c < expert_C.length(); ++c) load_C(c) = share_E[expert_C[c]];
}

// Order copies from the heaviest down, those of equal load by number: runs of 1, 2, 4 ... copies are merged.
void sort_by_load(const Array<float, 1> &load_C, const Array<int64_t, 1> &order_C) {
    int64_t copies = load_C.length();
    Scratch<int64_t, 1> merged_C(copies);
    for (int64_t c = 0; c < copies; ++c) order_C(c) = c;
    for (int64_t width = 1; width < copies; width *= 2) {
        for (int64_t begin = 0; begin < copies; begin += 2 * width) {
            int64_t middle = min(begin + width, copies), end = min(begin + 2 * width, copies);
            int64_t left = begin, right = middle;
            for (int64_t i = begin; i < end; ++i) {
                bool is_right = left == middle || (right < end && load_C[order_C[right]] > load_C[order_C[left]]);
                merged_C(i) = order_C[is_right ? right++ : left++];
            }
        }
        for (int64_t i = 0; i < copies; ++i) order_C(i) = merged_C[i];
    }
}

}  // namespace simulate_eplb

// The expert in every place; a rank has equally many places.
LOOP void place_copies(const Array<const float, 1> &loads_E, int64_t num_ranks, const Array<int64_t, 1> &expert_P) {
    using namespace simulate_eplb;
    int64_t copies = expert_P.length(), room = copies / num_ranks;
    Scratch<int64_t, 1> expert_C(copies), order_C(copies), filled_G(num_ranks);
    Scratch<float, 1> load_C(copies), load_G(num_ranks);
    replicate(loads_E, expert_C, load_C);
    sort_by_load(load_C, order_C);
    for (int64_t i = 0; i < copies; ++i) {
        int64_t c = order_C[i], lightest = NONE;
        for (int64_t g = 0; g < num_ranks; ++g) {
            if (filled_G[g] < room && (lightest < 0 || load_G[g] < load_G[lightest])) lightest = g;
        }
        // as published, one place for each rank leaves the copies in their order
        int64_t place = room == 1 ? c : lightest * room + filled_G[lightest];
        expert_P(place) = expert_C[c];
        ++filled_G(lightest);
        load_G(lightest) += load_C[c];
    }
}

// Divide each source's assignments over the copies of their expert; `expert_H` is ascending.
LOOP void split_evenly(const Array<const int32_t, 1> &expert_H, const Array<const int32_t, 1> &copies_H,
                       const Array<const int64_t, 2> &counts_GE, const Array<int64_t, 2> &tokens_HG) {
    int64_t hosts = expert_H.length();
    for (int64_t first = 0, end = 0; first < hosts; first = end) {
        int32_t e = expert_H[first];
        int64_t copies = 0;
        for (end = first; end < hosts && expert_H[end] == e; ++end) copies += copies_H[end];
        if (copies == 0) continue;
        // remainders go round, so that the copies of an expert serve the same, give or take one
        int64_t turn = 0;
        for (int64_t g = 0; g < counts_GE.length(); ++g) {
            int64_t share = counts_GE(g, e) / copies, left = counts_GE(g, e) % copies;
            int64_t place = turn > 0 ? copies - turn : 0;  // of the first copy, counted from the one whose turn it is
            for (int64_t h = first; h < end; ++h) {
                int64_t tokens = share * copies_H[h];
                for (int64_t i = 0; i < copies_H[h]; ++i) {
                    tokens += place < left;
                    place = place + 1 < copies ? place + 1 : 0;
                }
                tokens_HG(h, g) = tokens;
            }
            turn = turn + left < copies ? turn + left : turn + left - copies;
        }
    }
}

// Copies of experts, their places, and splits over them, as eplb.py describes them.
#include "kernels.hpp"

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

// The expert of each copy, one of each expert first; then whatever has the largest load per copy.
LOOP void replicate_by_load(const Array<const float, 1> &loads_E, const Array<int64_t, 1> &expert_C,
                            const Array<int64_t, 1> &copies_E) {
    int64_t experts = loads_E.length();
    Scratch<float, 1> share_E(experts);
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
}

// The place of each copy, of which every rank has equally many; `heaviest_C` are copies in order.
LOOP void pack_copies(const Array<const float, 1> &load_C, const Array<const int64_t, 1> &heaviest_C,
                      int64_t num_ranks, const Array<int64_t, 1> &place_C) {
    int64_t room = load_C.length() / num_ranks;
    Scratch<float, 1> load_G(num_ranks);
    Scratch<int64_t, 1> filled_G(num_ranks);
    for (int64_t i = 0; i < heaviest_C.length(); ++i) {
        int64_t c = heaviest_C[i], lightest = NONE;
        for (int64_t g = 0; g < num_ranks; ++g) {
            if (filled_G[g] < room && (lightest < 0 || load_G[g] < load_G[lightest])) lightest = g;
        }
        place_C(c) = lightest * room + filled_G[lightest];
        ++filled_G(lightest);
        load_G(lightest) += load_C[c];
    }
}

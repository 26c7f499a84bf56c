// The check of picks, whose errors trace/checks.py words.
#include "kernels.hpp"

namespace trace_checks {

// See `are_sets_of_eight` below.
INLINED bool are_sets(const Array<const uint64_t, 2> &picks_NL, const Array<const bool, 1> &valid_N,
                      int64_t num_experts) {
    constexpr uint64_t ONES = 0x0101010101010101, TOPS = 0x8080808080808080;
    const int64_t num_layers = picks_NL.shape[1];
    for (int64_t row = 0; row < picks_NL.length(); ++row) {
        if (!valid_N[row]) continue;
        const uint64_t *picks_L = &picks_NL(row, 0);
        const uint8_t *ids = reinterpret_cast<const uint8_t *>(picks_L);
        uint64_t bad = 0;
        uint8_t most = 0;
        for (int64_t i = 0; i < 8 * num_layers; ++i) most = max(most, ids[i]);
        for (int64_t layer = 0; layer < num_layers; ++layer)
            // turned by one to four bytes, each id has met each other of its word
            for (int turn = 8; turn <= 32; turn += 8) {
                const uint64_t differ = picks_L[layer] ^ (picks_L[layer] << turn | picks_L[layer] >> (64 - turn));
                bad |= (differ - ONES) & ~differ & TOPS;  // not 0 where a byte is 0
            }
        if (bad != 0 || most >= num_experts) return false;
    }
    return true;
}

WIDE bool are_sets_by_wide_vectors(const Array<const uint64_t, 2> &picks_NL, const Array<const bool, 1> &valid_N,
                                   int64_t num_experts) {
    return are_sets(picks_NL, valid_N, num_experts);
}

// Find the first (row, layer) of `rows` with an id of E or more or an expert twice: row * L + layer, or NONE.
// Models mostly pick eight, for which the loop over picks is unrolled.
template <class T, int K = 0>
int64_t first_bad_picks(const Array<const T, 3> &ids_NLK, const Array<const int64_t, 1> &rows, int64_t num_experts) {
    if (K == 0 && ids_NLK.shape[2] == 8) return first_bad_picks<T, 8>(ids_NLK, rows, num_experts);
    const int64_t num_layers = ids_NLK.shape[1], top_k = K > 0 ? K : ids_NLK.shape[2];
    // seen(e) is the stamp of the last row and layer that picked e. No two have the same, so that nothing needs to be
    // cleared in between.
    Scratch<int64_t, 1> seen(int64_t{1} << (8 * sizeof(T)));
    int64_t stamp = 0;
    for (int64_t i = 0; i < rows.length(); ++i) {
        const auto ids_LK = ids_NLK[rows[i]];
        for (int64_t layer = 0; layer < num_layers; ++layer) {
            const auto ids_K = ids_LK[layer];
            bool bad = false;
            ++stamp;
            for (int64_t k = 0; k < top_k; ++k) {
                const int64_t expert = ids_K[k];
                bad |= (seen(expert) == stamp) | (expert >= num_experts);
                seen(expert) = stamp;
            }
            if (bad) return rows[i] * num_layers + layer;
        }
    }
    return NONE;
}

}  // namespace trace_checks

// Say whether all picks of routed rows, words of eight ids of one byte, are eight different ids below E. Rows where
// `valid_N` is false are not looked at.
LOOP bool are_sets_of_eight(const Array<const uint64_t, 2> &picks_NL, const Array<const bool, 1> &valid_N,
                            int64_t num_experts) {
    using namespace trace_checks;
    return (has_wide_vectors ? are_sets_by_wide_vectors : are_sets)(picks_NL, valid_N, num_experts);
}

LOOP int64_t first_bad_picks_uint8(const Array<const uint8_t, 3> &ids_NLK, const Array<const int64_t, 1> &rows,
                                   int64_t num_experts) {
    return trace_checks::first_bad_picks(ids_NLK, rows, num_experts);
}

LOOP int64_t first_bad_picks_uint16(const Array<const uint16_t, 3> &ids_NLK, const Array<const int64_t, 1> &rows,
                                    int64_t num_experts) {
    return trace_checks::first_bad_picks(ids_NLK, rows, num_experts);
}

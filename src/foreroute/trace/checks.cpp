// The check of picks, whose errors trace/checks.py words.
#include "kernels.hpp"

namespace trace_checks {

constexpr uint64_t IN_EACH_BYTE = 0x0101010101010101, LOW_BITS = 0x7F * IN_EACH_BYTE, HIGH_BITS = 0x80 * IN_EACH_BYTE;

// Find the first (row, layer) of `rows` with an id of E or more or an expert twice: row * L + layer, or NONE.
template <class T>
int64_t first_bad_picks(const Array<const T, 3> &ids_NLK, const Array<const int64_t, 1> &rows, int64_t num_experts) {
    const int64_t num_layers = ids_NLK.shape[1], top_k = ids_NLK.shape[2];
    // seen(e) is the stamp of the last row and layer that picked e. No two have the same, so that nothing needs to be
    // cleared in between.
    Scratch<int64_t, 1> seen(int64_t{1} << (8 * sizeof(T)));
    int64_t stamp = 0;
    for (int64_t i = 0; i < rows.length(); ++i) {
        for (int64_t layer = 0; layer < num_layers; ++layer) {
            const auto ids_K = ids_NLK[rows[i]][layer];
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

// Say whether all picks of routed rows, words of eight ids of one byte, are eight different ids below E, many layers at
// a time. Rows where `valid_N` is false are not looked at.
LOOP bool are_sets_of_eight(const Array<const uint64_t, 2> &picks_NL, const Array<const bool, 1> &valid_N,
                            int64_t num_experts) {
    using namespace trace_checks;
    // A byte of E or more: its lower bits and this number reach the highest bit, which stands for 128. Up to 128 experts
    // that bit tells by itself too; above, both must be there.
    const uint64_t reach = static_cast<uint64_t>((num_experts <= 128 ? 128 : 256) - num_experts) * IN_EACH_BYTE;
    const uint64_t either = num_experts <= 128 ? ~uint64_t{0} : 0;
    for (int64_t row = 0; row < picks_NL.length(); ++row) {
        if (!valid_N[row]) continue;
        const auto picks_L = picks_NL[row];
        uint64_t bad = 0;
        for (int64_t layer = 0; layer < picks_L.length(); ++layer) {
            const uint64_t word = picks_L[layer], carried = (word & LOW_BITS) + reach;
            bad |= (word & carried) | ((word | carried) & either);
            // Turned by one to four bytes, each byte has met each other; two that are alike leave a byte of zeros, from
            // which one is borrowed.
            for (int turn = 8; turn <= 32; turn += 8) {
                const uint64_t met = word ^ ((word << turn) | (word >> (64 - turn)));
                bad |= (met - IN_EACH_BYTE) & ~met;
            }
        }
        if (bad & HIGH_BITS) return false;
    }
    return true;
}

LOOP int64_t first_bad_picks_uint8(const Array<const uint8_t, 3> &ids_NLK, const Array<const int64_t, 1> &rows,
                                   int64_t num_experts) {
    return trace_checks::first_bad_picks(ids_NLK, rows, num_experts);
}

LOOP int64_t first_bad_picks_uint16(const Array<const uint16_t, 3> &ids_NLK, const Array<const int64_t, 1> &rows,
                                    int64_t num_experts) {
    return trace_checks::first_bad_picks(ids_NLK, rows, num_experts);
}

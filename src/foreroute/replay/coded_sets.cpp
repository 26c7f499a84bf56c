// The encoder of replay/coded_sets.py, which says what is written.
#include "kernels.hpp"

namespace replay_coded_sets {

using Numbers = Array<const int64_t, 1>;
using Units = int32_t __attribute__((vector_size(32)));
using Bytes = uint8_t __attribute__((vector_size(8)));

// Write the `units` of one set, ascending: their high parts to `high`, whole words of zeros, and `low_bits` planes of low
// parts to `coded`. False where one is further than `high` is long.
inline bool put_set(const int32_t *units, int64_t top_k, int64_t low_bits, const Array<uint8_t, 1> &high,
                    const Array<uint8_t, 1> &coded, int64_t set, const Numbers &plane_at) {
    const int64_t step = low_bits > 0, set_bytes = ceil_div(top_k, 8);
    // ones ascend, so that a word is whole when the next one begins
    uint64_t word = 0;
    int64_t at = 0;
    for (int64_t i = 0; i < top_k; ++i) {
        if (i && units[i] <= units[i - 1]) return false;  // one too few would shift all sets behind it
        const int64_t place = (units[i] >> low_bits) + step * i;
        if (place >> 6 != at) {
            memcpy(&high(8 * at), &word, 8);
            word = 0;
            at = place >> 6;
            if (at < 0 || 8 * at >= high.length()) return false;
        }
        word |= uint64_t{1} << (place & 63);
    }
    memcpy(&high(8 * at), &word, 8);
    for (int64_t first = 0; first < top_k; first += 8) {
        Units eight = {};
        memcpy(&eight, units + first, sizeof(int32_t) * min<int64_t>(8, top_k - first));
        for (int64_t bit = 0; bit < low_bits; ++bit) {
            const Bytes bytes = __builtin_convertvector(eight >> static_cast<int32_t>(bit) & 1, Bytes);
            // the product has byte i as bit i of its highest byte
            const uint64_t product = reinterpret_cast<uint64_t>(bytes) * 0x0102040810204080;
            coded(plane_at[bit] + set * set_bytes + first / 8) = static_cast<uint8_t>(product >> 56);
        }
    }
    return true;
}

}  // namespace replay_coded_sets

// Encode sets of `top_k` units for each of `heads`: those of row m begin at ids(start_M(m)), where unit u of head h is
// u * heads + h, and its high parts at coded(high_S(m * heads + h)). False where a head has another number of them, or
// a unit further than that has room for.
LOOP bool encode_sets(const Array<const int32_t, 1> &ids, const replay_coded_sets::Numbers &start_M,
                      const replay_coded_sets::Numbers &low_M, const replay_coded_sets::Numbers &high_S,
                      const replay_coded_sets::Numbers &plane_at, int64_t heads, int64_t top_k,
                      const Array<uint8_t, 1> &coded) {
    Scratch<int32_t, 2> units_HK(heads, top_k);
    Scratch<int64_t, 1> counts_H(heads);
    for (int64_t m = 0; m < start_M.length(); ++m) {
        const auto own = ids.slice(start_M[m], start_M[m] + heads * top_k);
        if (heads > 1) {
            counts_H.fill(0);
            for (int64_t i = 0; i < own.length(); ++i) {
                const int64_t head = own[i] % heads;
                if (head < 0 || counts_H[head] == top_k) return false;
                units_HK(head, counts_H(head)++) = static_cast<int32_t>(own[i] / heads);
            }
        }
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t set = m * heads + h;
            const auto high = coded.slice(high_S[set], high_S[set + 1]);
            const int32_t *units = heads > 1 ? &units_HK(h, 0) : &own(0);
            if (!replay_coded_sets::put_set(units, top_k, low_M[m], high, coded, set, plane_at)) return false;
        }
    }
    return true;
}

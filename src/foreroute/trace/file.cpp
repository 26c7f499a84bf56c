// Sets of picks on their way into a file and out of it. trace/file.py has the format.
#include "kernels.hpp"

namespace trace_file {

// Rows that are sorted or summed up at once. Their ids in all layers, or in planes about as many, fit the second-level
// cache. Shorter pieces of L · K planes take longer: each begins in a page of its own (256 took up to twice 1,024).
constexpr int64_t TILE_ROWS = 1024;

// One pick of all rows of a tile. The compiler makes vectors of these loops. `valid` is 1 for a routed row, where
// neighbours differ by 1 at least, and 0 for one without a route.

// Turn the rows of one layer into columns, with zeros for rows without a route.
template <class T>
void take_columns(const Array<const T, 3> &ids_RLK, int64_t layer, const Array<const bool, 1> &valid,
                  const Array<T, 2> &ids_KR) {
    for (int64_t row = 0; row < valid.length(); ++row) {
        for (int64_t k = 0; k < ids_RLK.shape[2]; ++k) ids_KR(k, row) = valid[row] ? ids_RLK(row, layer, k) : 0;
    }
}

// Put the smaller number of each pair into `low`, and the other into `high`.
template <class T>
void exchange(const Array<T, 1> &low, const Array<T, 1> &high) {
    for (int64_t row = 0; row < low.length(); ++row) {
        const T smaller = min(low[row], high[row]);
        high(row) = max(low[row], high[row]);
        low(row) = smaller;
    }
}

// Sort each column. Batcher's merge exchange for any number of keys: Knuth, The Art of Computer Programming, vol. 3,
// 5.2.2, M. A sorting network is a fixed list of exchanges, so that each is done for all rows at once. p, q, r and d are
// Knuth's: distances that are halved from pass to pass.
template <class T>
void sort_columns(const Array<T, 2> &ids_KR, int64_t count) {
    const int64_t top_k = ids_KR.length();
    // the first distance of exchanges: the largest power of two below K, or 1
    int64_t top = 1;
    while (2 * top < top_k) top *= 2;
    for (int64_t p = top; p > 0; p /= 2) {
        int64_t q = top, r = 0, d = p;
        while (d > 0) {
            for (int64_t i = 0; i < top_k - d; ++i) {
                if ((i & p) == r) exchange(ids_KR[i].slice(0, count), ids_KR[i + d].slice(0, count));
            }
            d = q - p;
            q /= 2;
            r = p;
        }
    }
}

// Take the gaps between sorted neighbours, and say whether two of them are the same expert.
template <class T>
bool take_gaps(const Array<T, 1> &low, const Array<T, 1> &high, const Array<const bool, 1> &valid,
               const Array<T, 1> &gaps) {
    T bad = 0;
    for (int64_t row = 0; row < gaps.length(); ++row) gaps(row) = static_cast<T>(high[row] - low[row] - valid[row]);
    for (int64_t row = 0; row < gaps.length(); ++row) {
        const T same = high[row] == low[row], routed = valid[row];
        bad |= same & routed;
    }
    return bad;
}

// Put the ids that lie by these gaps above others into `high`, and say whether one has left its type.
template <class T>
bool add_gaps(const Array<T, 1> &low, const Array<const T, 1> &gaps, const Array<const bool, 1> &valid,
              const Array<T, 1> &high) {
    T bad = 0;
    for (int64_t row = 0; row < gaps.length(); ++row) high(row) = static_cast<T>(low[row] + gaps[row] + valid[row]);
    // an id that left its type has wrapped, and is no longer above the one before
    for (int64_t row = 0; row < gaps.length(); ++row) {
        const T below = high[row] < low[row], same = high[row] == low[row], routed = valid[row];
        bad |= below | (same & routed);
    }
    return bad;
}

// Say whether the last id of a row is E or more, or that of a row without a route is not 0.
template <class T>
bool leaves_range(const Array<T, 1> &last, const Array<const bool, 1> &valid, int64_t num_experts) {
    const T most = static_cast<T>(num_experts - 1);
    T bad = 0;
    for (int64_t row = 0; row < valid.length(); ++row) {
        const T above = last[row] > most, filled = last[row] != 0, absent = !valid[row];
        bad |= above | (filled & absent);
    }
    return bad;
}

// Write the gaps between the sorted ids of each row, and say whether all are different and below E.
template <class T>
bool gaps_of_rows(const Array<const T, 3> &ids_RLK, const Array<const bool, 1> &valid_R, int64_t num_experts,
                  const Array<T, 3> &gaps_LKR) {
    const int64_t num_layers = gaps_LKR.shape[0], top_k = gaps_LKR.shape[1], rows = gaps_LKR.shape[2];
    Scratch<T, 2> ids_KR(top_k, TILE_ROWS);
    bool bad = false;
    for (int64_t start = 0; start < rows; start += TILE_ROWS) {
        const int64_t stop = min(start + TILE_ROWS, rows), count = stop - start;
        const auto valid = valid_R.slice(start, stop);
        for (int64_t layer = 0; layer < num_layers; ++layer) {
            const auto gaps_KR = gaps_LKR[layer];
            take_columns<T>(ids_RLK.slice(start, stop), layer, valid, ids_KR);
            sort_columns<T>(ids_KR, count);
            const auto first = gaps_KR[0].slice(start, stop), last = ids_KR[top_k - 1].slice(0, count);
            memcpy(first.data, ids_KR.data, count * sizeof(T));
            for (int64_t k = 1; k < top_k; ++k) {
                const auto low = ids_KR[k - 1].slice(0, count), high = ids_KR[k].slice(0, count);
                bad |= take_gaps<T>(low, high, valid, gaps_KR[k].slice(start, stop));
            }
            bad |= leaves_range<T>(last, valid, num_experts);
        }
    }
    return !bad;
}

// Write the columns of a tile into rows from `start` on, as many ids at once as a word holds.
template <class T, class Word>
void put_words(const Array<T, 2> &ids_KR, int64_t start, int64_t count, int64_t layer, const Array<T, 3> &out_RLK) {
    constexpr int64_t PER_WORD = sizeof(Word) / sizeof(T);
    Word words[TILE_ROWS];
    for (int64_t first = 0; first < ids_KR.length(); first += PER_WORD) {
        // rows lie far apart: what goes into one is put together before, the first id in the lowest bits
        for (int64_t row = 0; row < count; ++row) words[row] = ids_KR(first, row);
        for (int64_t k = 1; k < PER_WORD; ++k) {
            const auto ids = ids_KR[first + k];
            for (int64_t row = 0; row < count; ++row) words[row] |= static_cast<Word>(ids[row]) << (k * 8 * sizeof(T));
        }
        for (int64_t row = 0; row < count; ++row) memcpy(&out_RLK(start + row, layer, first), &words[row], sizeof(Word));
    }
}

// Put sets into their rows, ids ascending, and say whether all are below E and rows without a route have zeros.
template <class T>
bool put_sets(const Array<const T, 3> &gaps_LKR, const Array<const bool, 1> &valid_R, int64_t num_experts,
              const Array<T, 3> &out_RLK) {
    const int64_t num_layers = gaps_LKR.shape[0], top_k = gaps_LKR.shape[1], rows = gaps_LKR.shape[2];
    // the widest words that the ids of a row and layer fill
    const int64_t bytes = top_k * sizeof(T);
    const auto put = bytes % 8 == 0   ? put_words<T, uint64_t>
                     : bytes % 4 == 0 ? put_words<T, uint32_t>
                     : bytes % 2 == 0 ? put_words<T, uint16_t>
                                      : put_words<T, T>;
    Scratch<T, 2> ids_KR(top_k, TILE_ROWS);
    bool bad = false;
    // all layers of a tile of rows, and then the next tile
    for (int64_t start = 0; start < rows; start += TILE_ROWS) {
        const int64_t stop = min(start + TILE_ROWS, rows), count = stop - start;
        const auto valid = valid_R.slice(start, stop);
        for (int64_t layer = 0; layer < num_layers; ++layer) {
            const auto gaps_KR = gaps_LKR[layer];
            memcpy(ids_KR.data, gaps_KR[0].slice(start, stop).data, count * sizeof(T));
            for (int64_t k = 1; k < top_k; ++k) {
                const auto low = ids_KR[k - 1].slice(0, count), high = ids_KR[k].slice(0, count);
                bad |= add_gaps<T>(low, gaps_KR[k].slice(start, stop), valid, high);
            }
            bad |= leaves_range<T>(ids_KR[top_k - 1].slice(0, count), valid, num_experts);
            put(ids_KR, start, count, layer, out_RLK);
        }
    }
    return !bad;
}

}  // namespace trace_file

LOOP bool gaps_of_rows_uint8(const Array<const uint8_t, 3> &ids_RLK, const Array<const bool, 1> &valid_R,
                             int64_t num_experts, const Array<uint8_t, 3> &gaps_LKR) {
    return trace_file::gaps_of_rows<uint8_t>(ids_RLK, valid_R, num_experts, gaps_LKR);
}

LOOP bool gaps_of_rows_uint16(const Array<const uint16_t, 3> &ids_RLK, const Array<const bool, 1> &valid_R,
                              int64_t num_experts, const Array<uint16_t, 3> &gaps_LKR) {
    return trace_file::gaps_of_rows<uint16_t>(ids_RLK, valid_R, num_experts, gaps_LKR);
}

LOOP bool put_sets_uint8(const Array<const uint8_t, 3> &gaps_LKR, const Array<const bool, 1> &valid_R,
                         int64_t num_experts, const Array<uint8_t, 3> &out_RLK) {
    return trace_file::put_sets<uint8_t>(gaps_LKR, valid_R, num_experts, out_RLK);
}

LOOP bool put_sets_uint16(const Array<const uint16_t, 3> &gaps_LKR, const Array<const bool, 1> &valid_R,
                          int64_t num_experts, const Array<uint16_t, 3> &out_RLK) {
    return trace_file::put_sets<uint16_t>(gaps_LKR, valid_R, num_experts, out_RLK);
}

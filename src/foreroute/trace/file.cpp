// Sets of picks on their way into a file and out of it. trace/file.py has the format.
#include "kernels.hpp"

namespace trace_file {

// Rows that are sorted or summed up at once. Their ids in all layers, or in planes about as many, fit the second-level
// cache. Shorter pieces of L · K planes take longer: each begins in a page of its own (256 took up to twice 1,024).
constexpr int64_t TILE_ROWS = 1024;

// Turn the rows of one layer into columns, with zeros for rows without a route.
template <class T>
void take_columns(const Array<const T, 3> &ids_RLK, int64_t layer, const Array<const bool, 1> &valid,
                  const Array<T, 2> &ids_KR) {
    for (int64_t k = 0; k < ids_KR.length(); ++k)
        for (int64_t row = 0; row < valid.length(); ++row)
            ids_KR(k, row) = valid[row] ? ids_RLK(row, layer, k) : 0;
}

// Write columns into the rows of one layer.
template <class T>
void put_columns(const Array<T, 2> &ids_KR, int64_t layer, const Array<T, 3> &out_RLK) {
    for (int64_t row = 0; row < out_RLK.length(); ++row)
        for (int64_t k = 0; k < ids_KR.length(); ++k) out_RLK(row, layer, k) = ids_KR(k, row);
}

// One pick of all rows of a tile. The compiler makes vectors of these loops, as it is told that columns do not overlap.
// `valid` is 1 for a routed row, where neighbours differ by 1 at least, and 0 for one without a route.

// Put the smaller number of each pair into `low`, and the other into `high`.
template <class T>
void exchange(T *__restrict low, T *__restrict high, int64_t count) {
    for (int64_t row = 0; row < count; ++row) {
        const T smaller = min(low[row], high[row]);
        high[row] = max(low[row], high[row]);
        low[row] = smaller;
    }
}

// Take the gaps between sorted neighbours, and say whether two of them are the same expert.
template <class T>
bool take_gaps(const T *__restrict low, const T *__restrict high, const bool *__restrict valid, T *__restrict gaps,
               int64_t count) {
    T bad = 0;
    for (int64_t row = 0; row < count; ++row) {
        const T same = high[row] == low[row], routed = valid[row];
        gaps[row] = high[row] - low[row] - routed;
        bad |= same & routed;
    }
    return bad;
}

// Put the ids that lie by these gaps above others into `high`, and say whether one has left its type.
template <class T>
bool add_gaps(const T *__restrict low, const T *__restrict gaps, const bool *__restrict valid, T *__restrict high,
              int64_t count) {
    T bad = 0;
    for (int64_t row = 0; row < count; ++row) {
        const T routed = valid[row], above = low[row] + gaps[row] + routed;
        // an id that left its type has wrapped, and is no longer above the one before
        const T below = above < low[row], same = above == low[row];
        high[row] = above;
        bad |= below | (same & routed);
    }
    return bad;
}

// Say whether the last id of a row is E or more, or that of a row without a route is not 0.
template <class T>
bool leaves_range(const T *__restrict last, const bool *__restrict valid, int64_t num_experts, int64_t count) {
    const T most = static_cast<T>(num_experts - 1);
    T bad = 0;
    for (int64_t row = 0; row < count; ++row) {
        const T above = last[row] > most, filled = last[row] != 0, absent = !valid[row];
        bad |= above | (filled & absent);
    }
    return bad;
}

// Sort the ids of each row. Batcher's merge exchange for any number of keys: Knuth, The Art of Computer Programming,
// vol. 3, 5.2.2, M. A sorting network is a fixed list of exchanges, so that each is done for all rows at once. p, q, r
// and d are Knuth's: distances that are halved from pass to pass.
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
                if ((i & p) == r) exchange(ids_KR[i].data, ids_KR[i + d].data, count);
            }
            d = q - p;
            q /= 2;
            r = p;
        }
    }
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
            memcpy(gaps_KR[0].slice(start, stop).data, ids_KR.data, count * sizeof(T));
            for (int64_t k = 1; k < top_k; ++k) {
                T *gaps = gaps_KR[k].slice(start, stop).data;
                bad |= take_gaps(ids_KR[k - 1].data, ids_KR[k].data, valid.data, gaps, count);
            }
            bad |= leaves_range(ids_KR[top_k - 1].data, valid.data, num_experts, count);
        }
    }
    return !bad;
}

// Put sets into their rows, ids ascending, and say whether all are below E and rows without a route have zeros.
template <class T>
bool put_sets(const Array<const T, 3> &gaps_LKR, const Array<const bool, 1> &valid_R, int64_t num_experts,
              const Array<T, 3> &out_RLK) {
    const int64_t num_layers = gaps_LKR.shape[0], top_k = gaps_LKR.shape[1], rows = gaps_LKR.shape[2];
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
                const T *gaps = gaps_KR[k].slice(start, stop).data;
                bad |= add_gaps(ids_KR[k - 1].data, gaps, valid.data, ids_KR[k].data, count);
            }
            bad |= leaves_range(ids_KR[top_k - 1].data, valid.data, num_experts, count);
            put_columns<T>(ids_KR, layer, out_RLK.slice(start, stop));
        }
    }
    return !bad;
}

template <class T>
WIDE [[gnu::flatten]] bool put_sets_by_wide_vectors(const Array<const T, 3> &gaps_LKR,
                                                    const Array<const bool, 1> &valid_R, int64_t num_experts,
                                                    const Array<T, 3> &out_RLK) {
    return put_sets<T>(gaps_LKR, valid_R, num_experts, out_RLK);
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
    using namespace trace_file;
    const auto put = has_wide_vectors ? put_sets_by_wide_vectors<uint8_t> : put_sets<uint8_t>;
    return put(gaps_LKR, valid_R, num_experts, out_RLK);
}

LOOP bool put_sets_uint16(const Array<const uint16_t, 3> &gaps_LKR, const Array<const bool, 1> &valid_R,
                          int64_t num_experts, const Array<uint16_t, 3> &out_RLK) {
    using namespace trace_file;
    const auto put = has_wide_vectors ? put_sets_by_wide_vectors<uint16_t> : put_sets<uint16_t>;
    return put(gaps_LKR, valid_R, num_experts, out_RLK);
}

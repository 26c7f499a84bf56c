// The counts of trace/operations.py.
#include "kernels.hpp"

namespace trace_operations {

using Numbers = Array<const int64_t, 1>;

// Count the picks of sequences `order`; those of one start are neighbours there. The counts of sequence s begin at
// start_S(s) of `flat_counts`, and those of a layer at layer_L(l) from there. False where a pick is E or more: a trace
// that was made by its constructor is not checked before.
template <class T>
bool add_counts(const Array<const T, 3> &ids_NLK, const Array<const bool, 1> &valid_N,
                const Numbers &offsets, const Numbers &order, const Numbers &start_S, const Numbers &layer_L,
                int64_t num_experts, const Array<int32_t, 1> &flat_counts) {
    const int64_t num_layers = ids_NLK.shape[1], top_k = ids_NLK.shape[2];
    // Before each sequence, `held_LE` has the picks of those since the last one with another start, and `flat_counts`
    // all others: two levels, because the counts of one start are few enough to stay in the first-level cache, and free
    // of the collisions in it that a large power of two between layers would cause.
    Scratch<int32_t, 2> held_LE(num_layers, num_experts);
    for (int64_t i = 0; i < order.length(); ++i) {
        const int64_t s = order[i];
        for (int64_t row = offsets[s]; row < offsets[s + 1]; ++row) {
            if (!valid_N[row]) continue;
            const auto ids_LK = ids_NLK[row];
            T largest = 0;  // of the row at once, in vectors: a question at each pick takes half as long as counting
            for (int64_t i = 0; i < num_layers * top_k; ++i) largest = max(largest, ids_LK.data[i]);
            if (largest >= num_experts) return false;
            for (int64_t layer = 0; layer < num_layers; ++layer) {
                const auto held_E = held_LE[layer];
                const auto ids_K = ids_LK[layer];
                for (int64_t k = 0; k < top_k; ++k) held_E(ids_K[k]) += 1;
            }
        }
        if (i + 1 < order.length() && start_S[order[i + 1]] == start_S[s]) continue;
        for (int64_t layer = 0; layer < num_layers; ++layer) {
            const int64_t target = start_S[s] + layer_L[layer];
            for (int64_t e = 0; e < num_experts; ++e) flat_counts(target + e) += held_LE(layer, e);
        }
        held_LE.fill(0);
    }
    return true;
}

}  // namespace trace_operations

LOOP bool add_counts_uint8(const Array<const uint8_t, 3> &ids_NLK, const Array<const bool, 1> &valid_N,
                           const trace_operations::Numbers &offsets, const trace_operations::Numbers &order,
                           const trace_operations::Numbers &start_S, const trace_operations::Numbers &layer_L,
                           int64_t num_experts, const Array<int32_t, 1> &flat_counts) {
    return trace_operations::add_counts(ids_NLK, valid_N, offsets, order, start_S, layer_L, num_experts, flat_counts);
}

LOOP bool add_counts_uint16(const Array<const uint16_t, 3> &ids_NLK, const Array<const bool, 1> &valid_N,
                            const trace_operations::Numbers &offsets, const trace_operations::Numbers &order,
                            const trace_operations::Numbers &start_S, const trace_operations::Numbers &layer_L,
                            int64_t num_experts, const Array<int32_t, 1> &flat_counts) {
    return trace_operations::add_counts(ids_NLK, valid_N, offsets, order, start_S, layer_L, num_experts, flat_counts);
}

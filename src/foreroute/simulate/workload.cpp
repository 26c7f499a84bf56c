// Assignments of drawn sequences, as workload.py describes them.
#include "kernels.hpp"

namespace simulate_workload {

struct Rule {
    int64_t top_k, prompt_draws, response_draws;
    double common;
};

// The first entry of an ascending array that is above a number, or the last.
int64_t first_above(const Array<double, 1> &upto_E, double number) {
    int64_t first = 0;
    // without a branch, which nobody could predict: what is left is halved in either case
    for (int64_t left = upto_E.length() - 1; left > 0;) {
        int64_t half = (left + 1) / 2;
        first += half * (upto_E[first + half - 1] <= number);
        left -= half;
    }
    return first;
}

// Give or take the few assignments that float sums left over, from the last expert on that is not full.
void settle(int64_t missing, int32_t rows, const Array<int32_t, 1> &counts_E) {
    int64_t e = counts_E.length() - 1;
    while (e > 0 && counts_E[e] == rows) --e;
    while (missing != 0) {
        if (missing > 0 && counts_E[e] < rows) {
            ++counts_E(e);
            --missing;
        } else if (missing < 0 && counts_E[e] > 0) {
            --counts_E(e);
            ++missing;
        } else {
            e = (e + 1) % counts_E.length();
        }
    }
}

// Turn weights into whole counts that add up to rows * top_k, none above rows: cap, then round systematically.
void round_counts(const Array<double, 1> &weight_E, int32_t rows, int64_t top_k, double phase,
                  const Array<int32_t, 1> &counts_E) {
    int64_t left = rows * top_k, experts = weight_E.length();
    double sum = 0, scale = 0;
    for (int64_t e = 0; e < experts; ++e) sum += weight_E[e];
    // capping an expert leaves more to the others, which may then have to be capped; -1 marks those that are
    for (bool capped = true; capped;) {
        scale = sum > 0 ? static_cast<double>(left) / sum : 0;
        // few have to be, and to ask whether any does is a loop that vectors take
        int64_t above = 0;
        for (int64_t e = 0; e < experts; ++e) above |= weight_E[e] * scale > rows;
        capped = above;
        for (int64_t e = 0; capped && e < experts; ++e) {
            if (weight_E[e] * scale > rows) {
                sum -= weight_E[e];
                left -= rows;
                weight_E(e) = -1;
            }
        }
    }
    // systematic rounding: counts are the steps of floor(phase + running sum), so each is its weight rounded up or down
    int64_t done = 0;
    double upto = 0;
    for (int64_t e = 0; e < experts; ++e) {
        if (weight_E[e] < 0) {
            counts_E(e) = rows;
            continue;
        }
        upto += weight_E[e] * scale;
        int64_t reached = min(max(static_cast<int64_t>(upto + phase), done), done + rows);
        counts_E(e) = static_cast<int32_t>(reached - done);
        done = reached;
    }
    if (left != done) settle(left - done, rows, counts_E);
}

}  // namespace simulate_workload

// Add the assignments of every cell; `first_M`, [M + 1], is the first sequence of each micro-step.
LOOP void draw_cells(const Array<const uint64_t, 2> &seed_ML, const Array<const double, 3> &share_MLE,
                     const Array<const int64_t, 1> &first_M, const Array<const int32_t, 1> &prompt_S,
                     const Array<const int32_t, 1> &rows_S, const Array<const int32_t, 1> &rank_S,
                     const simulate_workload::Rule &rule, const Array<int32_t, 4> &counts_MLGE) {
    using namespace simulate_workload;
    int64_t experts = share_MLE.shape[2];
    Scratch<double, 1> upto_E(experts), weight_E(experts);
    Scratch<int32_t, 1> counts_E(experts);
    Scratch<int64_t, 1> topic(rule.prompt_draws);
    // Draws weigh 1 on average, so this much for the micro-step's shares makes them the part `common` of the sum.
    double scale = rule.common / (1 - rule.common) * static_cast<double>(rule.response_draws);
    for (int64_t m = 0; m < counts_MLGE.length(); ++m) {
        for (int64_t layer = 0; layer < counts_MLGE.shape[1]; ++layer) {
            auto share_E = share_MLE[m][layer];
            uint64_t state = seed_ML(m, layer);
            double sum = 0;
            for (int64_t e = 0; e < experts; ++e) upto_E(e) = sum += share_E[e];
            int32_t prompt = NONE;
            for (int64_t s = first_M[m]; s < first_M[m + 1]; ++s) {
                if (prompt_S[s] != prompt) {
                    prompt = prompt_S[s];
                    for (int64_t i = 0; i < rule.prompt_draws; ++i) topic(i) = first_above(upto_E, next_unit(state));
                }
                for (int64_t e = 0; e < experts; ++e) weight_E(e) = scale * share_E[e];
                for (int64_t i = 0; i < rule.response_draws; ++i) {
                    // The high half of a word picks an expert of the prompt, the low half gives its weight, 0.5 to 1.5.
                    uint64_t word = next_word(state);
                    uint64_t pick = ((word >> 32) * static_cast<uint64_t>(rule.prompt_draws)) >> 32;
                    double fraction = static_cast<double>(word & 0xFFFFFFFF) * (1.0 / 4294967296.0);
                    weight_E(topic(pick)) += 0.5 + fraction;
                }
                round_counts(weight_E, rows_S[s], rule.top_k, next_unit(state), counts_E);
                auto target_E = counts_MLGE[m][layer][rank_S[s]];
                for (int64_t e = 0; e < experts; ++e) target_E(e) += counts_E[e];
            }
        }
    }
}

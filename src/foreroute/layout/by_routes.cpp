// Exchanges of sequences between micro-steps, as layout/by_routes.py describes them.
#include "kernels.hpp"

namespace by_routes {

// Layers stand in blocks of as many as the widest vector has numbers: [blocks, G, LANES], the last block filled with 0.
constexpr int64_t LANES = 8;
// Of what a micro-step is above its share of the bound: how much worse an exchange may make it at first.
constexpr double HEAT = 0.1;
// What a pair that has no room costs, in numbers of loads.
constexpr int64_t REFUSED = 16;

struct Bins {
    Array<int64_t, 1> bin_S;           // micro-step * ranks + rank
    Array<const int64_t, 1> order_S;   // sequences by length
    Array<const int64_t, 1> spot_S;    // where a sequence stands in that order
    Array<const int64_t, 1> tokens_S;  // what a sequence holds
    Array<const double, 1> cost_S;     // what its attention costs
    Array<int64_t, 1> held_W;          // tokens of a bin, with padding where there is some
    Array<double, 1> dear_W;           // attention of a bin
    Array<double, 1> dearest_M;        // attention of the dearest bin of a micro-step
    Array<int64_t, 1> longest_M;       // tokens of the bin that holds most of a micro-step
    double most_dear;                  // most that the dearest may be in all
    int64_t most_long;                 // most that the longest may be in all
    int64_t token_budget;
    int64_t window;  // how far apart by length sequences are that are exchanged
    int64_t work;    // most numbers that are looked at
    int64_t ranks;   // bins of a micro-step
    bool padded;     // whether each sequence of a bin takes as much as the longest one there
    bool stay;       // whether sequences stay on their rank; whole bins of one are exchanged too then
};

// What else is known of bins.
struct Contents {
    Array<int64_t, 1> number_W;   // sequences; as many after an exchange of two
    Array<int64_t, 1> longest_W;  // the longest of them, or NONE
    Array<int32_t, 4> rows_W;     // what each rank's experts get, where whole bins are exchanged
};

// A bin after an exchange.
struct Changed {
    int64_t longest, held;
    double dear;
};

// Bin p, when it has sequence t in place of s.
inline Changed changed(const Bins &now, const Contents &contents, int64_t p, int64_t s, int64_t t) {
    int64_t longest = contents.longest_W[p];
    if (!now.padded)
        return {longest, now.held_W[p] + now.tokens_S[t] - now.tokens_S[s],
                now.dear_W[p] + (now.cost_S[t] - now.cost_S[s])};
    if (longest == s) {
        longest = t;
        for (int64_t i = 0; i < now.bin_S.length(); ++i)
            if (now.bin_S[i] == p && i != s && now.tokens_S[i] > now.tokens_S[longest]) longest = i;
    } else if (now.tokens_S[t] > now.tokens_S[longest]) {
        longest = t;
    }
    const int64_t number = contents.number_W[p];
    return {longest, number * now.tokens_S[longest], static_cast<double>(number) * now.cost_S[longest]};
}

// The sum over layers of the slowest rank of two micro-steps, when one gives sequence s for sequence t of the other.
INLINED int64_t slowest_after(const Array<int32_t, 3> &a, const Array<int32_t, 3> &b, const Array<int32_t, 3> &s,
                              const Array<int32_t, 3> &t) {
    const int64_t num_blocks = a.shape[0], num_ranks = a.shape[1];
    int64_t sum = 0, at = 0;
    for (int64_t block = 0; block < num_blocks; ++block) {
        int32_t x[LANES] = {}, y[LANES] = {};
        for (int64_t g = 0; g < num_ranks; ++g, at += LANES)
            for (int64_t i = 0; i < LANES; ++i) {
                const int32_t more = t.data[at + i] - s.data[at + i];
                x[i] = max(x[i], a.data[at + i] + more);
                y[i] = max(y[i], b.data[at + i] - more);
            }
        for (int64_t i = 0; i < LANES; ++i) sum += static_cast<int64_t>(x[i]) + y[i];
    }
    return sum;
}

// The most that a bin of a micro-step has, when one of them has another number.
template <class Number>
inline Number most_after(const Array<Number, 1> &of_W, int64_t num_ranks, int64_t bin, Number most) {
    const int64_t first = bin / num_ranks * num_ranks;
    for (int64_t p = first; p < first + num_ranks; ++p)
        if (p != bin) most = max(most, of_W[p]);
    return most;
}

// The sum over layers of the slowest rank of a micro-step.
inline int64_t slowest(const Array<int32_t, 3> &load) {
    int64_t sum = 0;
    for (int64_t block = 0; block < load.shape[0]; ++block)
        for (int64_t i = 0; i < LANES; ++i) {
            int32_t most = 0;
            for (int64_t g = 0; g < load.shape[1]; ++g) most = max(most, load(block, g, i));
            sum += most;
        }
    return sum;
}

INLINED void search(const Bins &now, const Contents &contents, const Array<int32_t, 4> &rows_S,
                    const Array<int32_t, 4> &load_M, const Array<int64_t, 1> &slowest_M, double heat) {
    const int64_t size = now.bin_S.length(), ranks = now.ranks, numbers = load_M[0].size();
    // when nothing that is worse is kept any more, every pair is tried about once before the search ends
    const int64_t patience = size * min(size, 2 * now.window);
    double all_dearest = 0;
    int64_t all_longest = 0;
    for (int64_t m = 0; m < now.dearest_M.length(); ++m)
        all_dearest += now.dearest_M[m], all_longest += now.longest_M[m];
    uint64_t random = 0;
    int64_t looked_at = 0;
    for (int64_t idle = 0; idle < patience && looked_at < now.work; ++idle, looked_at += REFUSED) {
        // A search that only goes down ends in the first dip. So what is worse is kept too, less and less often, as in
        // simulated annealing: zeros before the first one of a random word fall off as a logarithm does, exactly.
        const double cooled = 1.0 - 2.0 * static_cast<double>(looked_at) / static_cast<double>(now.work);
        double worse = 0;
        if (cooled > 0 && heat > 0) {
            worse = heat * cooled * static_cast<double>(__builtin_clzll(next_word(random) | 1));
            idle = -1;
        }
        const uint64_t word = next_word(random);
        const int64_t s = static_cast<int64_t>((word >> 32) % static_cast<uint64_t>(size));
        // one of four exchanges is of whole bins, which no budget hinders
        const bool whole = now.stay && next_word(random) % 4 == 0;
        int64_t t = NONE, q = now.bin_S[s] % ranks;
        if (whole) {
            q += static_cast<int64_t>((word & 0xFFFFFFFF) % static_cast<uint64_t>(load_M.length())) * ranks;
        } else {
            const int64_t apart = static_cast<int64_t>((word & 0xFFFFFFFF) % static_cast<uint64_t>(2 * now.window + 1));
            const int64_t spot = now.spot_S[s] + apart - now.window;
            if (spot < 0 || spot >= size) continue;
            t = now.order_S[spot];
            if (now.stay && now.bin_S[t] % ranks != q) continue;
            q = now.bin_S[t];
        }
        const int64_t p = now.bin_S[s], a = p / ranks, b = q / ranks;
        if (a == b) continue;
        Changed of_p = {contents.longest_W[q], now.held_W[q], now.dear_W[q]};
        Changed of_q = {contents.longest_W[p], now.held_W[p], now.dear_W[p]};
        if (!whole) {
            of_p = changed(now, contents, p, s, t), of_q = changed(now, contents, q, t, s);
            if (of_p.held > now.token_budget || of_q.held > now.token_budget) continue;
        }
        const double dearest_a = most_after(now.dear_W, ranks, p, of_p.dear);
        const double dearest_b = most_after(now.dear_W, ranks, q, of_q.dear);
        const double grown = dearest_a + dearest_b - now.dearest_M[a] - now.dearest_M[b];
        if (all_dearest + grown > now.most_dear) continue;
        // who has most tokens sends most rows
        const int64_t longest_a = most_after(now.held_W, ranks, p, of_p.held);
        const int64_t longest_b = most_after(now.held_W, ranks, q, of_q.held);
        const int64_t lengthened = longest_a + longest_b - now.longest_M[a] - now.longest_M[b];
        if (all_longest + lengthened > now.most_long) continue;
        looked_at += numbers;
        const Array<int32_t, 3> from = load_M[a], to = load_M[b];
        const Array<int32_t, 3> out = whole ? contents.rows_W[p] : rows_S[s];
        const Array<int32_t, 3> in = whole ? contents.rows_W[q] : rows_S[t];
        const int64_t change = slowest_after(from, to, out, in) - slowest_M[a] - slowest_M[b];
        if (change >= static_cast<int64_t>(worse)) continue;
        for (int64_t i = 0; i < numbers; ++i) {
            const int32_t more = in.data[i] - out.data[i];
            from.data[i] += more;
            to.data[i] -= more;
            if (now.stay) {
                contents.rows_W[p].data[i] += more;
                contents.rows_W[q].data[i] -= more;
            }
        }
        slowest_M(a) = slowest(from), slowest_M(b) = slowest(to);
        now.held_W(p) = of_p.held, now.held_W(q) = of_q.held;
        now.dear_W(p) = of_p.dear, now.dear_W(q) = of_q.dear;
        contents.longest_W(p) = of_p.longest, contents.longest_W(q) = of_q.longest;
        now.dearest_M(a) = dearest_a, now.dearest_M(b) = dearest_b, all_dearest += grown;
        now.longest_M(a) = longest_a, now.longest_M(b) = longest_b, all_longest += lengthened;
        if (whole) {
            const int64_t number = contents.number_W[p];
            contents.number_W(p) = contents.number_W[q], contents.number_W(q) = number;
            for (int64_t i = 0; i < size; ++i)
                if (const int64_t at = now.bin_S[i]; at == p || at == q) now.bin_S(i) = at == p ? q : p;
        } else {
            now.bin_S(s) = q, now.bin_S(t) = p;
        }
        idle = -1;
    }
}

WIDE void search_wide(const Bins &now, const Contents &contents, const Array<int32_t, 4> &rows_S,
                      const Array<int32_t, 4> &load_M, const Array<int64_t, 1> &slowest_M, double heat) {
    search(now, contents, rows_S, load_M, slowest_M, heat);
}

}  // namespace by_routes

// What each rank's experts get of a sequence: int32 [S, blocks, G, LANES], which holds zeros.
LOOP void rows_by_rank(const Array<const int32_t, 3> &counts_SLE, const Array<const int64_t, 2> &home_LE,
                       const Array<int32_t, 4> &rows_S) {
    for (int64_t s = 0; s < counts_SLE.length(); ++s)
        for (int64_t layer = 0; layer < home_LE.length(); ++layer)
            for (int64_t e = 0; e < home_LE.shape[1]; ++e)
                rows_S(s, layer / by_routes::LANES, home_LE(layer, e), layer % by_routes::LANES) +=
                    counts_SLE(s, layer, e);
}

// Exchange pairs of sequences while the sum over cells of the slowest rank falls; `load_M` holds zeros, as does
// `slowest_2M`, which gets the sums of every micro-step before and after.
LOOP void exchange_sequences(const by_routes::Bins &bins, const Array<int32_t, 4> &rows_S,
                             const Array<int32_t, 4> &load_M, const Array<int64_t, 2> &slowest_2M) {
    const int64_t num_bins = bins.held_W.length(), numbers = load_M[0].size();
    Scratch<int64_t, 1> number_W(num_bins), longest_W(num_bins);
    longest_W.fill(NONE);
    Scratch<int32_t, 4> rows_W(bins.stay ? num_bins : 0, load_M.shape[1], load_M.shape[2], load_M.shape[3]);
    for (int64_t s = 0; s < rows_S.length(); ++s) {
        const int64_t p = bins.bin_S[s], longest = longest_W[p];
        number_W(p) += 1;
        if (longest == NONE || bins.tokens_S[s] > bins.tokens_S[longest]) longest_W(p) = s;
        const Array<int32_t, 3> rows = rows_S[s], load = load_M[p / bins.ranks];
        for (int64_t i = 0; i < numbers; ++i) load.data[i] += rows.data[i];
        for (int64_t i = 0; bins.stay && i < numbers; ++i) rows_W[p].data[i] += rows.data[i];
    }
    Scratch<int32_t, 3> step(load_M.shape[1], load_M.shape[2], load_M.shape[3]);
    int64_t above = 0;
    for (int64_t m = 0; m < load_M.length(); ++m) {
        above += slowest_2M(0, m) = slowest_2M(1, m) = by_routes::slowest(load_M[m]);
        for (int64_t i = 0; i < numbers; ++i) step.data[i] += load_M[m].data[i];
    }
    above -= by_routes::slowest(step);
    const double heat = by_routes::HEAT * static_cast<double>(above) / static_cast<double>(load_M.length());
    (has_wide_vectors ? by_routes::search_wide : by_routes::search)(bins, {number_W, longest_W, rows_W}, rows_S,
                                                                    load_M, slowest_2M[1], heat);
}

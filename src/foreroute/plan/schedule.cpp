// Loops over flat arrays that fill the schedule of one rank, cell by cell. plan/schedule.py defines its order.
//
// Axis letters: C cells of a block, G ranks, E experts, R replicas of a cell, S groups of this rank, V edges.
#include "plan/hosts.hpp"

namespace plan_schedule {

constexpr int64_t SOURCES_AT_ONCE = 16;  // int32 of a cache line

// As MOVE of schedule.py.
struct Move {
    int32_t round, number, expert, row, peer, slot, position;
    bool by_host;
};

// As _Block of schedule.py.
struct Block {
    Array<int64_t, 2> send_CG, receive_CG, group_rows_CS;
    Array<int64_t, 1> num_groups_C;
    int64_t num_home;
    Array<int64_t, 2> send_segments, expert_segments, return_segments;
    Array<Move, 1> sends, hosted;
    Array<int64_t, 2> ends_CX;
};

// Append a segment of rows, unless it is empty.
inline void append(const Array<int64_t, 2> &segments, int64_t &at, int64_t start, int64_t length) {
    if (length == 0) return;
    segments(at, 0) = start;
    segments(at, 1) = length;
    ++at;
}

// The largest degree of a bipartite multigraph: how many rounds its edges take.
inline int64_t rounds_needed(Array<const int64_t, 1> source_V, Array<const int64_t, 1> target_V, int64_t num_ranks) {
    Scratch<int64_t, 2> degree(2, num_ranks);
    int64_t most = 0;
    for (int64_t v = 0; v < source_V.length(); ++v) {
        most = max(most, max(++degree(0, source_V[v]), ++degree(1, target_V[v])));
    }
    return most;
}

// Colour the edges of a bipartite multigraph with that many colours.
//
// An edge takes a round that is free at both ends; if there is none, the path that alternates between the round free at
// one end and that free at the other is flipped. Koenig's theorem: that many are enough, and fewer cannot be.
// edge_at(0, g, turn) and edge_at(1, g, turn) are filled with a sender's and a receiver's edge of a round, or NONE.
inline void colour(Array<const int64_t, 1> source_V, Array<const int64_t, 1> target_V, int64_t num_rounds,
                   Array<int64_t, 3> edge_at, Array<int64_t, 1> round_V) {
    const int64_t num_edges = source_V.length(), num_ranks = edge_at.shape[1];
    Scratch<int64_t, 1> path_V(num_edges);
    for (int end = 0; end < 2; ++end) {
        for (int64_t g = 0; g < num_ranks; ++g) edge_at[end][g].slice(0, num_rounds).fill(NONE);
    }
    // every edge so far has a round, and no two edges of a sender or of a receiver have the same
    for (int64_t v = 0; v < num_edges; ++v) {
        const int64_t source = source_V[v], target = target_V[v];
        int64_t free_out = 0, free_in = 0;
        while (edge_at(0, source, free_out) != NONE) ++free_out;
        while (edge_at(1, target, free_in) != NONE) ++free_in;
        if (free_out != free_in) {
            // Flip the path that leaves the target in the round that is free at the source. It ends, because a vertex
            // has at most one edge in a round; and not at the source, which it could reach in the free round alone.
            const int64_t free[] = {free_out, free_in};
            int64_t length = 0, side = 1, vertex = target;
            for (int64_t edge; (edge = edge_at(side, vertex, free[length % 2])) != NONE; ++length) {
                path_V(length) = edge;
                side = 1 - side;
                vertex = side == 0 ? source_V[edge] : target_V[edge];
            }
            for (int64_t j = 0; j < length; ++j) {
                edge_at(0, source_V[path_V[j]], free[j % 2]) = NONE;
                edge_at(1, target_V[path_V[j]], free[j % 2]) = NONE;
            }
            for (int64_t j = 0; j < length; ++j) {
                edge_at(0, source_V[path_V[j]], free[1 - j % 2]) = path_V[j];
                edge_at(1, target_V[path_V[j]], free[1 - j % 2]) = path_V[j];
            }
        }
        edge_at(0, source, free_out) = v;
        edge_at(1, target, free_out) = v;
    }
    for (int64_t g = 0; g < num_ranks; ++g) {
        for (int64_t turn = 0; turn < num_rounds; ++turn) {
            if (edge_at(0, g, turn) != NONE) round_V(edge_at(0, g, turn)) = turn;
        }
    }
}

// What is known of one cell. Replicas of a cell are numbered from 0.
struct Cell {
    int64_t c, num_replicas;
    Array<int16_t, 1> home_E, expert_R, rank_R, slot_R;
    Array<int32_t, 2> tokens_RG;
    Array<const int32_t, 2> counts_GE;

    Cell(const Hosts &hosts, const Array<const int32_t, 3> &counts_CGE, int64_t c)
        : c(c), home_E(hosts.home_LE[c % hosts.home_LE.length()]), counts_GE(counts_CGE[c]) {
        const int64_t begin = hosts.offsets[c], end = hosts.offsets[c + 1];
        num_replicas = end - begin;
        expert_R = hosts.expert_R.slice(begin, end);
        rank_R = hosts.rank_R.slice(begin, end);
        slot_R = hosts.slot_R.slice(begin, end);
        tokens_RG = hosts.tokens_RG.slice(begin, end);
    }
};

inline int64_t most_replicas(const Array<int64_t, 1> &offsets) {
    int64_t most = 0;
    for (int64_t c = 0; c + 1 < offsets.length(); ++c) most = max(most, offsets[c + 1] - offsets[c]);
    return most;
}

// Fields of `Hosts`, by their number.
enum Field : int64_t { HOME_LE, OFFSETS, EXPERT_R, RANK_R, SLOT_R, FETCHED_R, TOKENS_RG };

// The first array of hosts that does not fit the others and the counts, or NONE: those of a plan made by hand were
// never checked.
inline int64_t misfit(int64_t rank, const Hosts &hosts, const Array<const int32_t, 3> &counts_CGE) {
    const auto [num_cells, num_ranks, num_experts] = counts_CGE.shape;
    const int64_t num_replicas = hosts.expert_R.length();
    if (!hosts.home_LE.length() || hosts.home_LE.shape[1] != num_experts) return HOME_LE;
    if (hosts.rank_R.length() != num_replicas) return RANK_R;
    if (hosts.slot_R.length() != num_replicas) return SLOT_R;
    if (hosts.tokens_RG.length() != num_replicas || hosts.tokens_RG.shape[1] != num_ranks) return TOKENS_RG;
    if (rank < 0 || rank >= num_ranks) return TOKENS_RG;
    if (hosts.offsets.length() != num_cells + 1 || hosts.offsets[0] != 0) return OFFSETS;
    for (int64_t c = 0; c < num_cells; ++c)
        if (hosts.offsets[c] > hosts.offsets[c + 1]) return OFFSETS;
    return hosts.offsets[num_cells] <= num_replicas ? NONE : OFFSETS;
}

// Fills a block cell by cell. Its arrays are those of the cell that it is at.
struct Scheduler {
    const int64_t rank, memory_ranks;
    const Block &out;
    const int64_t num_ranks, num_experts, num_home, most_groups;
    int64_t ends[5] = {};                            // of the segments and moves so far
    Scratch<int64_t, 1> home_row_E;                  // of an expert in its home's shard
    Scratch<int64_t, 2> member_GS;                   // the experts of each home
    Scratch<int64_t, 1> order_R, nth_R, first_G;     // replicas by (rank, slot), the place of each on its rank
    Scratch<int32_t, 2> served_GE;                   // by replicas
    Scratch<int64_t, 1> start_E, mine_E, start_R;    // this rank's assignments: those of homes, and of replicas
    Scratch<int64_t, 2> tokens_SG, arrived_SG, computed_SG;
    Scratch<int64_t, 1> position_S;
    Scratch<int64_t, 1> source_R, target_R, round_R, position_R;  // in the order of order_R
    Scratch<int64_t, 3> edge_at;

    // `most` is the number of replicas of the largest cell.
    Scheduler(int64_t rank, int64_t memory_ranks, const Block &out, int64_t num_ranks, int64_t num_experts,
              int64_t most)
        : rank(rank), memory_ranks(memory_ranks), out(out), num_ranks(num_ranks), num_experts(num_experts),
          num_home(out.num_home), most_groups(out.group_rows_CS.shape[1]), home_row_E(num_experts),
          member_GS(num_ranks, num_home), order_R(most), nth_R(most), first_G(num_ranks + 1),
          served_GE(num_ranks, num_experts), start_E(num_experts), mine_E(num_experts), start_R(most),
          tokens_SG(most_groups, num_ranks), arrived_SG(most_groups, num_ranks), computed_SG(most_groups, num_ranks),
          position_S(num_home), source_R(most), target_R(most), round_R(most), position_R(most),
          edge_at(2, num_ranks, most) {}

    // The first array of a cell that names what is not there: homes, as many on every rank; experts, ranks and slots of
    // replicas. NONE where all is there.
    int64_t not_there(const Cell &cell) const {
        Scratch<int64_t, 1> homes_G(num_ranks), replicas_G(num_ranks);
        for (int64_t e = 0; e < num_experts; ++e) {
            const int64_t g = cell.home_E[e];
            if (g < 0 || g >= num_ranks || ++homes_G(g) > num_home) return HOME_LE;
        }
        for (int64_t r = 0; r < cell.num_replicas; ++r) {
            const int64_t e = cell.expert_R[r], g = cell.rank_R[r];
            if (e < 0 || e >= num_experts) return EXPERT_R;
            if (g < 0 || g >= num_ranks) return RANK_R;
            if (++replicas_G(g) > most_groups - num_home) return SLOT_R;
        }
        return NONE;
    }

    // List the experts of every rank in ascending order of their id, and the place of each.
    void order_homes(const Cell &cell) {
        Scratch<int64_t, 1> num_G(num_ranks);
        for (int64_t e = 0; e < num_experts; ++e) {
            const int64_t g = cell.home_E[e], row = num_G(g)++;
            home_row_E(e) = row;
            member_GS(g, row) = e;
        }
    }

    // Order replicas by (rank, slot), and number those of each rank.
    void order_replicas(const Cell &cell) {
        first_G.fill(0);
        for (int64_t r = 0; r < cell.num_replicas; ++r) ++first_G(cell.rank_R[r] + 1);
        for (int64_t g = 0; g < num_ranks; ++g) first_G(g + 1) += first_G[g];
        Scratch<int64_t, 1> num_G(num_ranks);
        for (int64_t r = 0; r < cell.num_replicas; ++r) {
            const int64_t g = cell.rank_R[r];
            int64_t j = first_G[g] + num_G(g)++;
            for (; j > first_G[g] && cell.slot_R[order_R[j - 1]] > cell.slot_R[r]; --j) order_R(j) = order_R[j - 1];
            order_R(j) = r;
        }
        for (int64_t g = 0; g < num_ranks; ++g) {
            for (int64_t i = first_G[g]; i < first_G[g + 1]; ++i) nth_R(order_R[i]) = i - first_G[g];
        }
    }

    // Count what replicas serve of every source.
    void count_served(const Cell &cell) {
        served_GE.fill(0);
        // a few sources at a time, whose rows stay in the cache while all replicas write to them
        for (int64_t begin = 0; begin < num_ranks; begin += SOURCES_AT_ONCE) {
            const int64_t end = min(begin + SOURCES_AT_ONCE, num_ranks);
            for (int64_t r = 0; r < cell.num_replicas; ++r) {
                const int64_t e = cell.expert_R[r];
                for (int64_t g = begin; g < end; ++g) served_GE(g, e) += cell.tokens_RG(r, g);
            }
        }
    }

    // Find the first source and expert of which more is served than there is. It is looked for on all ranks, so that
    // all see what is wrong.
    bool has_excess(const Cell &cell, const Array<int64_t, 1> &excess) const {
        for (int64_t g = 0; g < num_ranks; ++g) {
            bool found = false;
            for (int64_t e = 0; e < num_experts; ++e) found |= served_GE(g, e) > cell.counts_GE(g, e);
            if (!found) continue;
            int64_t e = 0;
            while (served_GE(g, e) <= cell.counts_GE(g, e)) ++e;
            excess(0) = e;
            excess(1) = g;
            excess(2) = int64_t{served_GE(g, e)} - cell.counts_GE(g, e);
            return true;
        }
        return false;
    }

    // What of an expert a source sends to its home.
    int64_t to_home(const Cell &cell, int64_t g, int64_t e) const {
        return int64_t{cell.counts_GE(g, e)} - served_GE(g, e);
    }

    // Send this rank's assignments.
    void send(const Cell &cell) {
        // sorted by expert, and those of an expert go to its home first, then to its replicas
        Scratch<int64_t, 1> cursor_E(num_experts);
        int64_t offset = 0;
        for (int64_t e = 0; e < num_experts; ++e) {
            mine_E(e) = to_home(cell, rank, e);
            start_E(e) = offset;
            cursor_E(e) = offset + mine_E[e];
            offset += cell.counts_GE(rank, e);
        }
        for (int64_t i = 0; i < cell.num_replicas; ++i) {
            const int64_t r = order_R[i], e = cell.expert_R[r];  // in ascending order of rank
            start_R(r) = cursor_E[e];
            cursor_E(e) += cell.tokens_RG(r, rank);
        }
        // they leave in order of (target rank, group)
        for (int64_t g = 0; g < num_ranks; ++g) {
            int64_t sent = 0;
            for (int64_t s = 0; s < num_home; ++s) {
                const int64_t e = member_GS(g, s);
                append(out.send_segments, ends[0], start_E[e], mine_E[e]);
                sent += mine_E[e];
            }
            for (int64_t i = first_G[g]; i < first_G[g + 1]; ++i) {
                const int64_t r = order_R[i];
                append(out.send_segments, ends[0], start_R[r], cell.tokens_RG(r, rank));
                sent += cell.tokens_RG(r, rank);
            }
            out.send_CG(cell.c, g) = sent;
        }
    }

    // Count the assignments of every source to every group of this rank; returns how many groups.
    int64_t count_groups(const Cell &cell) {
        for (int64_t s = 0; s < num_home; ++s) {
            const int64_t e = member_GS(rank, s);
            for (int64_t g = 0; g < num_ranks; ++g) tokens_SG(s, g) = to_home(cell, g, e);
        }
        const int64_t hosted = first_G[rank + 1] - first_G[rank];
        for (int64_t i = 0; i < hosted; ++i) {
            const int64_t r = order_R[first_G[rank] + i];
            for (int64_t g = 0; g < num_ranks; ++g) tokens_SG(num_home + i, g) = cell.tokens_RG(r, g);
        }
        return num_home + hosted;
    }

    // Transpose the (source rank, group) table of segments: from received to computed order, and back.
    void compute(int64_t c, int64_t num_groups) {
        int64_t total = 0;
        for (int64_t g = 0; g < num_ranks; ++g) {
            const int64_t before = total;
            for (int64_t s = 0; s < num_groups; ++s) {
                arrived_SG(s, g) = total;
                total += tokens_SG(s, g);
            }
            out.receive_CG(c, g) = total - before;
        }
        const auto rows_S = out.group_rows_CS[c];
        int64_t home_rows = 0, replica_rows = 0;
        for (int64_t s = 0; s < num_groups; ++s) {
            rows_S(s) = 0;
            for (int64_t g = 0; g < num_ranks; ++g) rows_S(s) += tokens_SG(s, g);
            (s < num_home ? home_rows : replica_rows) += rows_S[s];
        }
        // a grouped GEMM is never given an empty input: one row from beyond those received, which is not sent back
        if (home_rows == 0) rows_S(0) = 1;
        if (replica_rows == 0 && num_groups > num_home) rows_S(num_home) = 1;
        out.num_groups_C(c) = num_groups;
        int64_t offset = 0;
        for (int64_t s = 0; s < num_groups; ++s) {
            const int64_t end = offset + rows_S[s];
            for (int64_t g = 0; g < num_ranks; ++g) {
                computed_SG(s, g) = offset;
                append(out.expert_segments, ends[1], arrived_SG(s, g), tokens_SG(s, g));
                offset += tokens_SG(s, g);
            }
            append(out.expert_segments, ends[1], total, end - offset);
            offset = end;
        }
        for (int64_t g = 0; g < num_ranks; ++g) {
            for (int64_t s = 0; s < num_groups; ++s) {
                append(out.return_segments, ends[2], computed_SG(s, g), tokens_SG(s, g));
            }
        }
    }

    // Place the gradients that come home in order of (row, peer); replicas are in order of their rank already.
    void place_gradients(const Cell &cell) {
        position_S.fill(0);
        for (int64_t i = 0; i < cell.num_replicas; ++i) {
            const int64_t row = home_row_E[cell.expert_R[order_R[i]]];
            if (source_R[i] == rank && row + 1 < num_home) ++position_S(row + 1);
        }
        for (int64_t s = 1; s < num_home; ++s) position_S(s) += position_S[s - 1];
        for (int64_t i = 0; i < cell.num_replicas; ++i) {
            if (source_R[i] == rank) position_R(i) = position_S(home_row_E[cell.expert_R[order_R[i]]])++;
        }
    }

    // Move weights from homes to replicas, and gradients back.
    void move(const Cell &cell) {
        if (cell.num_replicas == 0) return;
        for (int64_t i = 0; i < cell.num_replicas; ++i) {
            source_R(i) = cell.home_E[cell.expert_R[order_R[i]]];
            target_R(i) = cell.rank_R[order_R[i]];
        }
        const auto sources = source_R.slice(0, cell.num_replicas), targets = target_R.slice(0, cell.num_replicas);
        const int64_t num_rounds = rounds_needed(sources, targets, num_ranks);
        colour(sources, targets, num_rounds, edge_at, round_R);
        place_gradients(cell);
        // in the order in which they are posted, as the sending and as the hosting end
        for (int64_t turn = 0; turn < num_rounds; ++turn) {
            for (int end = 0; end < 2; ++end) {
                const int64_t i = edge_at(end, rank, turn);
                if (i == NONE) continue;
                const int64_t r = order_R[i], peer = end == 0 ? target_R[i] : source_R[i];
                Move &made = (end == 0 ? out.sends : out.hosted)(ends[3 + end]++);
                made.round = turn;
                made.number = i;
                made.expert = cell.expert_R[r];
                made.row = home_row_E[cell.expert_R[r]];
                made.peer = peer;
                made.slot = cell.slot_R[r];
                made.position = end == 0 ? position_R[i] : nth_R[r];
                made.by_host = peer / memory_ranks == rank / memory_ranks;
            }
        }
    }
};

}  // namespace plan_schedule

// Fill `out` for the cells of a block, whose layers are 0, 1, ... L - 1, 0, ... Returns NONE, or the first cell whose
// replicas serve more than there is: `excess` has the expert, the source rank, and by how many; or the first that names
// what is not there: the expert is NONE, and then comes the array.
LOOP int64_t schedule_cells(int64_t rank, const Hosts &hosts, const Array<const int32_t, 3> &counts_CGE,
                            int64_t memory_ranks, const plan_schedule::Block &out, const Array<int64_t, 1> &excess) {
    using namespace plan_schedule;
    excess(0) = NONE;
    if ((excess(1) = misfit(rank, hosts, counts_CGE)) != NONE) return 0;
    Scheduler schedule(rank, memory_ranks, out, counts_CGE.shape[1], counts_CGE.shape[2], most_replicas(hosts.offsets));
    for (int64_t c = 0; c < counts_CGE.length(); ++c) {
        const Cell cell(hosts, counts_CGE, c);
        if ((excess(1) = schedule.not_there(cell)) != NONE) return c;
        schedule.order_homes(cell);
        schedule.order_replicas(cell);
        schedule.count_served(cell);
        if (schedule.has_excess(cell, excess)) return c;
        schedule.send(cell);
        schedule.compute(c, schedule.count_groups(cell));
        schedule.move(cell);
        for (int i = 0; i < 5; ++i) out.ends_CX(c, i) = schedule.ends[i];
    }
    return NONE;
}

// From quotas to tokens: every host gets whole tokens, its own rank's and its node's first.
#pragma once

#include "plan/hosts.hpp"

// Replicas of one expert, rows `begin` to `end` - 1 of arrays, and its home.
struct Replicas {
    Array<int16_t, 1> rank_R;
    Array<int32_t, 2> tokens_RG;
    int64_t begin, end;
    int64_t home, home_quota;
    int64_t ranks_per_node;
};

// Let a host serve tokens of the `size` ranks around it that have none yet; returns what is left of its quota.
template <class T>
inline int64_t take_near(const Array<T, 1> &tokens_G, const Array<int64_t, 1> &left_G, int64_t quota, int64_t rank,
                         int64_t size) {
    const int64_t begin = rank / size * size;
    for (int64_t g = begin; g < begin + size && quota > 0; ++g) {
        const int64_t taken = min(left_G(g), quota);
        tokens_G(g) += static_cast<T>(taken);
        left_G(g) -= taken;
        quota -= taken;
    }
    return quota;
}

// Share the tokens of one expert out to its replicas; the home gets what is left.
//
// No replica serves more than its quota in `quota_V`, which is used up. For given quotas no split keeps more assignments
// on their rank, nor on their node; without `local` they are shared out in order, wherever they come from. The tokens of
// each source rank, `left_G`, are taken from and added to `tokens_RG`; `home_G` is scratch.
inline void split_expert(const Replicas &replicas, const Array<int64_t, 1> &quota_V, const Array<int64_t, 1> &left_G,
                         const Array<int64_t, 1> &home_G, bool local) {
    // Three rounds: own rank, own node, the rest. In the first two the home comes first, at the end it gets what is
    // left. Tokens never leave a rank or node while a host there has quota left.
    const int64_t sizes[3] = {1, replicas.ranks_per_node, left_G.length()};
    int64_t home_quota = replicas.home_quota;
    for (int reach = local ? 0 : 2; reach < 3; ++reach) {
        if (reach < 2) home_quota = take_near(home_G, left_G, home_quota, replicas.home, sizes[reach]);
        for (int64_t r = replicas.begin; r < replicas.end; ++r) {
            int64_t &quota = quota_V(r - replicas.begin);
            quota = take_near(replicas.tokens_RG[r], left_G, quota, replicas.rank_R(r), sizes[reach]);
        }
    }
}

// The hosts of experts, as plan/hosts.py defines them.
#pragma once

#include "kernels.hpp"

struct CellPlan {
    Array<int16_t, 1> home_E, expert_R, rank_R, slot_R;
    Array<bool, 1> fetched_R;
    Array<int32_t, 2> tokens_RG;
};

struct Hosts {
    Array<int16_t, 2> home_LE;
    Array<int64_t, 1> offsets;
    Array<int16_t, 1> expert_R, rank_R, slot_R;
    Array<bool, 1> fetched_R;
    Array<int32_t, 2> tokens_RG;

    // Cell number c.
    CellPlan cell(int64_t c) const {
        const int64_t begin = offsets[c], end = offsets[c + 1];
        return {home_LE[c % home_LE.length()], expert_R.slice(begin, end),  rank_R.slice(begin, end),
                slot_R.slice(begin, end),      fetched_R.slice(begin, end), tokens_RG.slice(begin, end)};
    }
};

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
};

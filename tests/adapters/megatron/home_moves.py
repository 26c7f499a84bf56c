"""Training with experts that move between steps, beside the same training without: what is equal, and what is seen."""

import dataclasses

from tests.adapters.megatron.executed_plans import furthest, trained
from tests.trainers.verl import flex_kernels  # noqa: F401  # of DeepEP and HybridEP, which the flex dispatcher takes

STEPS = 4


def check_moves_change_nothing(case):
    # padding that is spread goes evenly to places, so that it goes elsewhere when homes move
    case = dataclasses.replace(case, padding="native")
    fixed, moved = (trained(case, planned, steps=STEPS) for planned in (None, "moved"))
    assert (fixed["moved"], moved["moved"] > 0) == (0, True)
    assert fixed["traces"] == moved["traces"]
    apart = furthest(moved, fixed)
    assert max(apart.values()) == 0, apart

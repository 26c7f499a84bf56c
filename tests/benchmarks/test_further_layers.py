"""The forecast of memory for models of more layers than were measured."""

import numpy as np

from benchmarks.harness.memory_peaks import with_layers
from foreroute.costs.memory import WORKS, StepMemory
from tests.costs.test_memory import EXPERT, case, memory_of, program


def test_further_layers_are_like_the_one_in_the_middle():
    plan, known, sizes = case(1)
    made = program(1)
    for name in ("forward", "backward"):
        for work in WORKS:
            made[name, 2, work] = made[name, 1, work]
    whole = memory_of(made)
    three = StepMemory(
        EXPERT, 1, [s._replace(layer=2 if s.layer == 3 else s.layer) for s in whole.sections if s.layer != 2]
    )
    np.testing.assert_array_equal(
        with_layers(three, 4).forecast(known, sizes, plan).bytes_MG, whole.forecast(known, sizes, plan).bytes_MG
    )

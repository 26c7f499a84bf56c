"""What no rank can do alone: put a recording together, and refuse a model of which one stage cannot be replayed."""

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import Cell

CELLS = [
    Cell(pp=2),
    Cell(pp=2, vpp=2, recompute="block"),
    Cell(cp=2, recompute="uniform"),
    Cell(cp=2, packed=True),
    Cell(tp=2, packed=True, recompute="selective"),
    Cell(ep=2),
    # the first of its virtual stages has no router
    Cell(pp=2, vpp=2, recompute="uniform", settings=(("moe_layer_freq", [0, 1, 1, 1]),)),
]


def marked(slow, exhaustive=()):
    marks = dict.fromkeys(slow, pytest.mark.slow) | dict.fromkeys(exhaustive, pytest.mark.exhaustive)
    return [pytest.param(cell, marks=marks.get(number, ())) for number, cell in enumerate(CELLS)]


@pytest.mark.parametrize("cell", marked(slow=(1, 2, 3, 4, 5)), ids=str)
def test_a_recording_is_put_together_on_every_rank(cell):
    rows = run("over_ranks_checks.check_recording", cell, ranks=2)
    assert rows[0] == rows[1] > 0


@pytest.mark.parametrize("cell", marked(slow=(2, 4), exhaustive=(0, 3, 5, 6)), ids=str)
def test_margins_gate_weights_and_rollouts_are_put_together_on_every_rank(cell):
    run("over_ranks_checks.check_margins_weights_and_rollouts", cell, ranks=2)


def test_the_refusal_of_one_stage_reaches_all():
    run("over_ranks_checks.check_a_stage_that_cannot_be_attached", Cell(pp=2), ranks=2, timeout=60)

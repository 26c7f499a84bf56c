"""Replay in every way of training in parallel that runs on the CPU.

A sample of the grid runs in CI, in which every pair of values of any two axes occurs; by night each of its 16 variants
in every split of the model. Then layers that are not simply all of them, every score function, and what is left to
stand-ins: it really cannot run, for the reason given, so that the list cannot rot.
"""

import itertools

import pytest

from tests.adapters.megatron.forked_ranks import WorkersError, run
from tests.adapters.megatron.grid import MOST_RANKS, PARALLEL, SAMPLE, SCORES, SHAPES, Cell, variants_of
from tests.tiers import grid

SPLITS = [cell for cell in PARALLEL if cell.ranks <= MOST_RANKS]


@pytest.mark.slow
@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_routes_reach_every_router_as_recorded(cell):
    run("grid_checks.check_cells", [cell], ranks=cell.ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", SPLITS, ids=[cell.split for cell in SPLITS])
def test_so_they_do_in_every_variant(split):
    run("grid_checks.check_cells", variants_of(split), ranks=split.ranks, timeout=300)


def test_every_pair_of_values_is_in_the_sample():
    def values(cells):
        axes = ("ep", "tp", "cp", "recompute", "dispatcher", "packed")
        return [{"stages": (cell.pp, cell.vpp)} | {axis: getattr(cell, axis) for axis in axes} for cell in cells]

    every = [cell for split in SPLITS for cell in variants_of(split)]
    assert set(SAMPLE) <= set(every)
    for one, other in itertools.combinations(values(every)[0], 2):
        wanted, found = ({(cell[one], cell[other]) for cell in values(cells)} for cells in (every, SAMPLE))
        assert found == wanted, (one, other)


SHAPES_AT_ONCE = ("dense first, on two stages",)
SHAPES_BY_NIGHT = ("experts over four ranks", "multi-token prediction", "short last virtual stages, dense first")
SCORES_AT_ONCE = ("limited to groups",)
"""Without the mark `slow`: the most that a name of a layer, and a gate, are made of."""


def all_of(names, at_once, by_night=()):
    assert {*at_once, *by_night} <= set(names)
    marks = dict.fromkeys(at_once, ()) | dict.fromkeys(by_night, pytest.mark.exhaustive)
    return [pytest.param(name, marks=marks.get(name, pytest.mark.slow)) for name in names]


@grid("name", all_of(SHAPES, SHAPES_AT_ONCE, SHAPES_BY_NIGHT), quick=1)
def test_routes_find_their_layers(name):
    run("grid_checks.check_cell", SHAPES[name], ranks=SHAPES[name].ranks)


@pytest.mark.parametrize("name", all_of(SCORES, SCORES_AT_ONCE))
def test_routes_are_followed_under_every_score_function(name):
    run("grid_checks.check_cell", SCORES[name])


CANNOT_RUN = {
    "packed sequences with the attention shipped for the CPU": (
        Cell(packed=True, as_shipped=True),
        "Packed sequence is not supported by DotProductAttention",
        "cpu_modules.PackedAttention",
    ),
    "context parallelism with the attention shipped for the CPU": (
        Cell(cp=2, as_shipped=True),
        "Context parallelism is only supported by TEDotProductAttention",
        "cpu_modules.PackedAttention; and the cut alone in test_cuts.py",
    ),
    "sequence parallelism with the norm shipped for the CPU": (
        Cell(tp=2, as_shipped=True),
        "sequence parallel not supported by torch LayerNorm",
        "cpu_modules.Norm; and the cut alone in test_cuts.py",
    ),
    "expert tensor parallelism with the all-to-all dispatcher": (
        Cell(ep=2, tp=2, etp=2),
        "ProcessGroupGloo::allgather: invalid tensor size",
        "the all-gather dispatcher: routers are cut by TP and never by ETP",
    ),
}
"""name: (cell, what Megatron or gloo says, what covers it)."""


@grid("name", CANNOT_RUN, quick=1)
def test_megatron_itself_refuses_the_cell_with_this_reason(name):
    cell, reason, _ = CANNOT_RUN[name]
    with pytest.raises(WorkersError) as refused:
        run("forked_ranks_worker.trains", cell, ranks=cell.ranks)
    assert reason in str(refused.value)


def test_a_shipped_cell_runs():
    """The control: what fails above fails for the reason given, not because nothing runs."""
    assert len(run("forked_ranks_worker.trains", Cell(as_shipped=True), ranks=1)[0]) == 3

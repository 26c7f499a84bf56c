"""What the grid leaves to stand-ins really cannot run, for the reason given: the list cannot rot."""

import pytest

from cannot_run import CANNOT_RUN, TOO_MANY_RANKS
from forked_ranks import RankError, run
from grid import MOST_RANKS, PARALLEL, Cell


@pytest.mark.parametrize("name", CANNOT_RUN)
def test_megatron_itself_refuses_the_cell_with_this_reason(name):
    cell, reason, _ = CANNOT_RUN[name]
    with pytest.raises(RankError) as refused:
        run("on_ranks.trains", cell, ranks=cell.ranks)
    assert reason in str(refused.value)


def test_a_shipped_cell_runs():
    """The control: what fails above fails for the reason given, not because nothing runs."""
    assert len(run("on_ranks.trains", Cell(as_shipped=True), ranks=1)[0]) == 3


def test_every_split_of_the_grid_runs_or_is_listed():
    assert [cell for cell in PARALLEL if cell.ranks > MOST_RANKS] == TOO_MANY_RANKS

"""The guess of the next cell against the order in which passes really ask for cells."""

import pytest

from foreroute.ep.transfer.replica_weights import next_cell
from tests.ep.transfer.plans import asked


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize(("updating", "checkpointed"), [(False, False), (True, False), (True, True)])
def test_the_next_cell_is_guessed_right(num_layers, updating, checkpointed):
    order = list(asked(3, num_layers, updating=updating, checkpointed=checkpointed))
    # the same cell again needs no transfer, so what counts is the next other one
    other = [cell for i, cell in enumerate(order) if i == 0 or cell != order[i - 1]]
    guesses = []
    for i, cell in enumerate(other):
        before = other[i - 1] if i else None
        guesses.append(next_cell(before, cell, range(num_layers), (3, num_layers), updating=updating))
    assert guesses == [*other[1:], None]

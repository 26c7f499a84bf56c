"""Experts that change their expert-parallel rank between two steps: training goes on as if nothing had moved."""

import pytest

from forked_ranks import run
from grid import Cell

TWO = [
    (Cell(ep=2, layers=2), "adamw", False),
    (Cell(ep=2, layers=2, dispatcher="allgather", packed=True, recompute="uniform"), "adafactor", True),
    (Cell(ep=2, tp=2, layers=2, packed=True, recompute="selective"), "momentum", True),
]


def test_moves_change_nothing_on_two_ranks():
    run("moving.check_cases", TWO, ranks=2)

"""The counts of all ranks, from those of each."""

import numpy as np

from foreroute.adapters import hf
from tests.ep.training import Case, policy

COUNTS_MLGE = np.arange(2 * 3 * 2 * 8).reshape(2, 3, 2, 8)
"""Of two micro-steps, the three layers of the policy, two ranks and its eight experts."""


def gathered(rank):
    placed = hf.distribute(policy(Case(ranks=2, plan=0)), timeout_s=20)
    return placed.gather_counts([counts_LGE[:, rank] for counts_LGE in COUNTS_MLGE])


def test_every_rank_gets_the_counts_of_all(workers):
    for found_MLGE in workers(2).run(gathered):
        np.testing.assert_array_equal(found_MLGE, COUNTS_MLGE)

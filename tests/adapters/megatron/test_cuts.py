"""Canary routes: the adapter places the rows of a rank that Megatron's own functions send there.

Row numbers go through `get_batch_on_this_cp_rank` and `scatter_to_sequence_parallel_region` the way that tokens and
hidden states do, also for more ranks than this machine runs.
"""

import numpy as np
import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.tiers import grid

SPLITS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (1, 4), (2, 4)]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@grid(("context_ranks", "tensor_ranks"), SPLITS, quick=3)
def test_the_adapter_cuts_as_megatron_does(context_ranks, tensor_ranks, packed):
    [of_ranks] = run("placed_rows_worker.rows_on_every_rank", context_ranks, tensor_ranks, packed)
    for rank, (seen_R, placed_R) in enumerate(of_ranks):
        assert np.array_equal(placed_R, seen_R), f"rank {rank} sees {seen_R} and was given {placed_R}"
    rows = np.concatenate([seen_R for seen_R, _ in of_ranks])
    assert np.array_equal(np.sort(rows[rows >= 0]), np.arange(sum(rows >= 0)))


def test_another_layout_is_seen():
    """The control: routes laid out with padding on the other side are on every rank, and in the wrong places."""
    [of_ranks] = run("placed_rows_worker.rows_on_every_rank_padded_on_the_left")
    assert all(not np.array_equal(placed_R, seen_R) for seen_R, placed_R in of_ranks)

"""The harness: results come back by rank, and what goes wrong on a rank comes back as one message."""

import os
from importlib import metadata

import pytest

from tests.adapters.megatron.forked_ranks import WorkersError, run


def test_the_megatron_that_runs_is_the_one_asked_for():
    """`make test-megatron-newest` puts another before the one that is installed, and says which."""
    [version] = run("forked_ranks_worker.version")
    # Megatron adds the commit of a repository that it lies in
    assert version.split("+")[0] == os.environ.get("FOREROUTE_MEGATRON", metadata.version("megatron-core"))


def test_every_rank_answers_and_they_form_a_group():
    assert run("forked_ranks_worker.sums_ranks", ranks=3) == [(3, 0), (3, 1), (3, 2)]


def test_what_a_check_breaks_is_whole_in_the_next():
    for _ in range(2):
        assert run("forked_ranks_worker.leaves_marks") == [((False,) * 3, (True,) * 3)]


@pytest.mark.slow
def test_what_a_rank_raises_is_reported_while_the_others_wait_for_it():
    with pytest.raises(WorkersError, match=r"rank 1 of 2 raised(.|\n)*did not like it"):
        run("forked_ranks_worker.raises_on_rank_one", ranks=2)


@pytest.mark.slow
def test_a_rank_that_hangs_is_reported_with_its_stack():
    with pytest.raises(WorkersError, match=r"ranks \[0, 1\] of 2 did not answer(.|\n)*in hangs_on_rank_one"):
        run("forked_ranks_worker.hangs_on_rank_one", ranks=2, timeout=3)

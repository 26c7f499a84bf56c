"""The harness: results come back by rank, and what goes wrong on a rank comes back as one message."""

import os
import time
from importlib import metadata

import pytest
import torch
import torch.distributed as dist

from tests.adapters.megatron.forked_ranks import WorkersError, run


def version():
    import megatron.core

    return megatron.core.__version__


def test_the_megatron_that_runs_is_the_one_asked_for():
    """`make test-megatron-newest` puts another before the one that is installed, and says which."""
    [found] = run("test_forked_ranks.version")
    # Megatron adds the commit of a repository that it lies in
    assert found.split("+")[0] == os.environ.get("FOREROUTE_MEGATRON", metadata.version("megatron-core"))


def sums_ranks():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total), dist.get_rank()


def test_every_rank_answers_and_they_form_a_group():
    assert run("test_forked_ranks.sums_ranks", ranks=3) == [(3, 0), (3, 1), (3, 2)]


def raises_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 did not like it")
    dist.barrier()


@pytest.mark.slow
def test_what_a_rank_raises_is_reported_while_the_others_wait_for_it():
    with pytest.raises(WorkersError, match=r"rank 1 of 2(.|\n)*like it"):
        run("test_forked_ranks.raises_on_rank_one", ranks=2)


def hangs_on_rank_one():
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


@pytest.mark.slow
def test_a_rank_that_hangs_is_reported_with_its_stack():
    with pytest.raises(WorkersError, match=r"ranks \[0, 1\] of 2(.|\n)*hangs_on_rank_one"):
        run("test_forked_ranks.hangs_on_rank_one", ranks=2, timeout=3)

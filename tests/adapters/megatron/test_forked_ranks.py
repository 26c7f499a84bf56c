"""The harness: what goes wrong on a rank comes back as one message, and which Megatron runs."""

import os
import time
from importlib import metadata

import pytest
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


def fails_on_rank_one(hangs):
    if dist.get_rank() == 1:
        if not hangs:
            raise ValueError("rank 1 did not like it")
        time.sleep(600)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hangs", "timeout", "said"),
    [(False, 120, r"rank 1 of 2(.|\n)*like it"), (True, 3, r"ranks \[0, 1\] of 2(.|\n)*fails_on_rank_one")],
    ids=["raises", "hangs"],
)
def test_what_goes_wrong_on_a_rank_is_reported_while_the_others_wait_for_it(hangs, timeout, said):
    with pytest.raises(WorkersError, match=said):
        run("test_forked_ranks.fails_on_rank_one", hangs, ranks=2, timeout=timeout)

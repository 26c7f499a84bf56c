"""Every property of executed plans, of models of every framework on two ranks."""

from functools import partial

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.ep.executor_properties import PROPERTIES, failures
from tests.ep.spread_steps import SpreadStep


def failures_of_transformers(rank, folder):
    return failures(partial(SpreadStep, rank, folder))


@pytest.fixture(scope="module")
def of_transformers(workers, folder_of):
    return workers(2).run(failures_of_transformers, folder_of())


@pytest.fixture(scope="module")
def of_megatron():
    return run("executor_subject.failures_here", ranks=2, timeout=200)


@pytest.mark.parametrize("framework", ["transformers", pytest.param("megatron", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROPERTIES)
def test_of(request, framework, name):
    failed = [of_rank[name] for of_rank in request.getfixturevalue(f"of_{framework}") if name in of_rank]
    if failed:
        pytest.fail(failed[0], pytrace=False)

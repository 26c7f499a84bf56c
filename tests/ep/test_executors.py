"""Every property of executed plans, of models of every framework on two ranks."""

from functools import partial

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.ep.executor_properties import CHECKS, EARLY, PROPERTIES, failures
from tests.ep.spread_steps import SpreadStep


def failures_of_transformers(rank, folder, asked):
    return failures(partial(SpreadStep, rank, folder), asked)


@pytest.fixture(scope="module")
def asked(request):
    found = {"transformers": set(), "megatron": set()}
    for item in request.session.items:
        if item.path == request.path:
            found[item.callspec.params["framework"]].add(item.callspec.params["name"])
    return found


@pytest.fixture(scope="module")
def of_transformers(workers, folder_of, asked):
    return workers(2).run(failures_of_transformers, folder_of(), asked["transformers"])


@pytest.fixture(scope="module")
def of_megatron(asked):
    return run("executor_subject.failures_here", asked["megatron"], ranks=2, timeout=200)


LATER = (
    "the_comparison_sees_what_is_lost_or_sent_elsewhere",
    "recomputation_and_the_backward_behind_it_share_a_fetch",
    "what_was_fetched_is_let_go_when_experts_have_computed",
)
"""Slow: the control, and what a step under a plan takes, not what it computes."""


def by_time(framework, number, name):
    """What is refused before any row is sent is refused by code that frameworks share: by day one has all of it."""
    mark = pytest.mark.slow if framework == "megatron" or name in LATER else ()
    if name not in CHECKS and number % 3:
        mark = pytest.mark.exhaustive if framework == "megatron" and name in EARLY else pytest.mark.slow
    return pytest.param(framework, name, marks=mark, id=f"{name}-{framework}")


@pytest.mark.parametrize(
    ("framework", "name"),
    [by_time(framework, *each) for each in enumerate(PROPERTIES) for framework in ("transformers", "megatron")],
)
def test_of(request, framework, name):
    failed = [of_rank[name] for of_rank in request.getfixturevalue(f"of_{framework}") if name in of_rank]
    if failed:
        pytest.fail(failed[0], pytrace=False)

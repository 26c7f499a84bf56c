from contextlib import ExitStack, closing

import pytest

from foreroute.testing.ranks import Workers


@pytest.fixture(scope="package")
def workers(compiled_planner):
    """`workers(4)`: four processes, started on first use and kept to the end; those that idle cost little."""
    groups = {}

    def of(num_ranks):
        if num_ranks not in groups or groups[num_ranks].is_closed:
            groups[num_ranks] = Workers(num_ranks, timeout_s=120)
        return groups[num_ranks]

    yield of
    for group in groups.values():
        group.close()


@pytest.fixture
def doomed():
    """`doomed(4)`: four processes of this test alone, in which some may die."""
    with ExitStack() as stack:
        yield lambda num_ranks: stack.enter_context(closing(Workers(num_ranks, timeout_s=120)))

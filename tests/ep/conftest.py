from contextlib import ExitStack, closing

import numpy as np
import pytest

from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from foreroute.testing.ranks import Workers
from tests.ep.transfer.plans import LINKS


@pytest.fixture(scope="package")
def workers():
    """`workers(4)`: four processes, started on first use and kept to the end; those that idle cost little."""
    groups = {}
    # compiled here once, and not by all processes at the same time
    for slots in ("layer", "shared"):
        plan(np.ones((1, 1, 2, 4), np.int32), Topology(2, 2, 1, LINKS), PlanOptions(slots=slots))

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

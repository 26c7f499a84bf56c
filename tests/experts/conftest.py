import numpy as np
import pytest

from foreroute.balance import PlanOptions, Topology, plan
from plans import LINKS
from processes import Workers


@pytest.fixture(scope="package")
def workers():
    """`workers(4)`: four processes. Only one group at a time: there are more processes than cores as it is."""
    groups = {}
    # compiled here once, and not by all processes at the same time
    for slots in ("layer", "shared"):
        plan(np.ones((1, 1, 2, 4), np.int32), Topology(2, 2, 1, LINKS), PlanOptions(slots=slots))

    def of(num_ranks):
        for other in [size for size in groups if size != num_ranks]:
            groups.pop(other).close()
        if num_ranks not in groups:
            groups[num_ranks] = Workers(num_ranks, timeout_s=120)
        return groups[num_ranks]

    yield of
    for group in groups.values():
        group.close()

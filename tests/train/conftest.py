import pytest

from foreroute.testing.ranks import Workers
from tests.adapters.hf.families import skip_where_nothing_is_spread


@pytest.fixture(scope="package")
def workers(compiled_planner):
    """`workers(4)`: four processes, started on first use and kept. Groups that wait cost memory alone."""
    skip_where_nothing_is_spread()
    groups = {}

    def of(num_ranks):
        if num_ranks not in groups:
            groups[num_ranks] = Workers(num_ranks, timeout_s=240)
        return groups[num_ranks]

    yield of
    for group in groups.values():
        group.close()

import pytest

from processes import Workers


@pytest.fixture(scope="package")
def workers():
    """`workers(4)`: four processes. Only one group at a time: there are more processes than cores as it is."""
    groups = {}

    def of(num_ranks):
        for other in [size for size in groups if size != num_ranks]:
            groups.pop(other).close()
        if num_ranks not in groups:
            groups[num_ranks] = Workers(num_ranks, timeout_s=240)
        return groups[num_ranks]

    yield of
    for group in groups.values():
        group.close()

import pytest

from foreroute.testing.ranks import Workers


@pytest.fixture(scope="module")
def workers():
    """`workers(4)`: four processes, started on first use in a module and kept to its end."""
    groups = {}

    def of(num_ranks):
        if num_ranks not in groups:
            groups[num_ranks] = Workers(num_ranks)
        return groups[num_ranks]

    yield of
    for group in groups.values():
        group.close()

import pytest

from tests.adapters.hf.families import skip_where_nothing_is_spread


@pytest.fixture(scope="session")
def workers(workers):
    skip_where_nothing_is_spread()
    return workers

import pytest

from foreroute.train.chain import ChainTask
from tests.adapters.hf.families import skip_where_nothing_is_spread
from tests.train.small_runs import random_rewards


@pytest.fixture(scope="session")
def workers(workers):
    skip_where_nothing_is_spread()
    return workers


@pytest.fixture
def rewards_that_differ(monkeypatch):
    """Those of an untrained model are all zero."""
    monkeypatch.setattr(ChainTask, "rewards", random_rewards())

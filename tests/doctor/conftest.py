"""What several tests of this room share."""

import pytest

from foreroute.doctor import examine


@pytest.fixture
def unwired(monkeypatch):
    """The wiring is not looked at, which is most of the time of an examination."""
    monkeypatch.setattr(examine, "QUICK", ())

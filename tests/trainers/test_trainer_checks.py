"""What both trainers are checked for, on a peer that is made up."""

import pytest

from foreroute.errors import AttachError
from foreroute.trainers.checks import require_overridden


class Engine:
    """Of the peer."""

    def step(self, batch):
        """A pass."""


class Replaying(Engine):
    """Of ours."""

    replays_routes = True

    def step(self, batch):
        """Replayed."""


class Measuring(Replaying):
    def log(self):
        """Of a method that the peer had once."""


def test_a_release_without_a_method_that_is_overridden_is_named():
    require_overridden("verl", "9.9", Replaying, Engine)
    with pytest.raises(AttachError, match=r"verl 9\.9 has no Engine\.log, which .*tested with verl 0\.9\.1"):
        require_overridden("verl", "9.9", Measuring, Engine)

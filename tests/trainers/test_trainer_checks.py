"""What both trainers are checked for, on a peer that is made up."""

from types import ModuleType

import pytest

from foreroute.errors import AttachError
from foreroute.trainers.checks import require_overridden
from foreroute.trainers.swapped import swapped


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


def test_a_function_is_swapped_while_the_context_is_open_and_given_back_whatever_happens():
    module = ModuleType("framework")
    module.split = original = lambda batch: [batch]

    def fails_inside():
        with swapped(module, "split", lambda own: lambda batch: own(batch) * 2):
            assert module.split(3) == [3, 3]
            raise KeyError

    with pytest.raises(KeyError):
        fails_inside()
    assert module.split is original
    with pytest.raises(AttachError, match="framework has no merge"), swapped(module, "merge", lambda own: own):
        pass

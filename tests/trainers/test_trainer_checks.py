"""What both trainers are checked for, on a peer that is made up."""

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from foreroute.errors import AttachError
from foreroute.trainers.checks import require_api
from foreroute.trainers.swapped import swapped

PEER = SimpleNamespace(__version__="9.9")


class Engine:
    def step(self, batch, loss_function):
        pass


@dataclass
class Config:
    strategy: str


def test_a_release_that_has_everything_is_taken():
    require_api("verl", PEER, Engine, {"step": ("batch",)}, config=Config, fields=("strategy",))


@pytest.mark.parametrize(
    ("methods", "fields", "said"),
    [
        ({"step": ("batch", "loss", "grad")}, (), r"has Engine\.step without loss, grad, which"),
        ({"run": ()}, (), r"has no Engine\.run, which"),
        ({"step": ()}, ("strategy", "replay"), "has Config without replay, which"),
    ],
)
def test_the_first_thing_that_a_release_lacks_is_named(methods, fields, said):
    with pytest.raises(AttachError, match=rf"verl 9\.9 {said} routing replay stands on; .*tested with verl 0\.9\.1"):
        require_api("verl", PEER, Engine, methods, config=Config, fields=fields)


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

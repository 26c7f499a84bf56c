"""Checkpoints bound by the call stack, without a model: who is told of what, and what is refused."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from foreroute.core import recompute
from foreroute.core.errors import ReplayError


class Owner:
    """Notes which pass is open whenever the function runs again."""

    def __init__(self):
        self.again = []

    @contextmanager
    def reopen(self, current, ran):
        self.again.append((current, ran))
        yield


def part(owner, current, name):
    """A function that binds the checkpoints around it, as a router does."""

    def run(x):
        recompute.bind(current, [name], owner.reopen)
        return x.sin()

    return run


def leaf():
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_two_owners_bind_one_checkpoint(use_reentrant):
    one, two = Owner(), Owner()

    def both(x):
        return part(two, "second", "b")(part(one, "first", "a")(x))

    checkpoint(both, leaf(), use_reentrant=use_reentrant).sum().backward()
    assert (one.again, two.again) == ([("first", ["a"])], [("second", ["b"])])


def test_one_checkpoint_around_two_passes_is_refused():
    """Its recomputation would run the second on the routes of the first."""
    owner = Owner()
    twice = lambda x: part(owner, "second", "a")(part(owner, "first", "a")(x))  # noqa: E731
    with pytest.raises(ReplayError, match=r"holds.*forwards"):
        checkpoint(twice, leaf(), use_reentrant=False)


class Elsewhere(torch.autograd.Function):
    """A checkpoint that keeps its function in no place that is known."""

    @staticmethod
    def forward(ctx, run_function, x):
        ctx.kept = run_function
        with torch.no_grad():
            return run_function(x)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def test_a_checkpoint_of_unknown_kind_is_refused():
    with pytest.raises(ReplayError, match=r"Elsewhere\.forward.*place"):
        Elsewhere.apply(part(Owner(), "pass", "a"), leaf())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"REENTRANT": None}, rf"torch {torch.__version__.split('+')[0]}.*place.*not known"),
        # as 2.14 did to whoever looked where 2.13 had it: the innermost one is found by its hook on saved tensors
        ({"NON_REENTRANT": None}, r"another \[2, 2, 2, 1\]"),
        ({"SELECTIVE": ()}, "number operators"),
    ],
)
def test_a_release_of_torch_that_keeps_functions_or_numbers_operators_otherwise_is_refused(changes, said, monkeypatch):
    recompute.prove()
    for name, value in changes.items():
        monkeypatch.setattr(recompute, name, value)
    with pytest.raises(ReplayError, match=said):
        recompute.prove.__wrapped__()

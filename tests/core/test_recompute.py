"""Checkpoints bound by the call stack, without a model: who is told of what, and what is refused."""

import functools
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from foreroute.core import recompute
from foreroute.core.errors import ReplayError


class Owner:
    """Notes which pass is open whenever the function runs again."""

    def __init__(self):
        self.now, self.again = None, []

    @contextmanager
    def reopen(self, current, ran):
        before, self.now = self.now, current
        self.again.append((current, ran))
        try:
            yield
        finally:
            self.now = before


def part(owner, current, *names):
    """A function that binds the checkpoints around it, as routers do, once for each name."""

    def run(x):
        for name in names:
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
        ({"REENTRANT": None}, rf"torch {torch.__version__.split('+')[0]}.* in a place that is not known"),
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


@pytest.mark.parametrize("saved", [(), (torch.ops.aten.topk.default,), (torch.ops.aten.sin.default,)])
def test_what_runs_unnumbered_in_the_forward_alone_moves_no_other_call(saved):
    """The oracle is the same function without a checkpoint."""
    runs = []

    def function(x):
        for _ in range(0 if runs else 3):
            recompute.run_unnumbered(lambda: (-x.detach()).topk(2))
        runs.append(None)
        y = x.sin()
        return (y * y.gather(0, y.topk(2).indices).sum()).sum()

    found = []
    for context_fn in (None, functools.partial(create_selective_checkpoint_contexts, list(saved))):
        runs.clear()
        x = torch.tensor([0.1, 0.5, 0.3, 0.2], requires_grad=True)
        options = {} if context_fn is None else {"context_fn": context_fn}
        (function(x) if context_fn is None else checkpoint(function, x, use_reentrant=False, **options)).backward()
        found.append(x.grad)
    assert torch.equal(*found)
    assert len(runs) == 2

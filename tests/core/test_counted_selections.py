"""Every router selects once in a pass; what ran in a compiled graph was counted on the device, without a wait."""

import pytest
import torch
import torch._dynamo  # graphs are looked for where it is loaded

from foreroute.core.errors import ReplayError
from foreroute.core.hooks import ModelHooks, RouterHook
from foreroute.core.passes import Rows
from foreroute.testing.counting_device import DEVICE, other_device


class Router(RouterHook):
    def select(self, now, forward, *args, **kwargs):
        return forward(*args, **kwargs)


class Hooks(ModelHooks):
    def read_args(self, args, kwargs):
        raise AssertionError("no forward runs in these tests")


@pytest.fixture
def hooks():
    return Hooks(0, torch.nn.Module(), [Router(f"layer {n}", (torch.nn.Module(), "forward"), 4, 2) for n in (0, 1)])


def counted(hooks, outside, inside):
    """A pass whose routers have selected so often outside of graphs, and inside."""
    current = hooks.open_pass(None, 3, DEVICE)
    current.calls = outside
    current.calls_L.copy_(torch.tensor(inside, dtype=torch.int32).to(DEVICE, non_blocking=True))
    return current


@pytest.mark.parametrize(("outside", "inside"), [([0, 0], [1, 1]), ([1, 0], [0, 1])])
def test_graphs_are_not_waited_for(hooks, outside, inside):
    with other_device() as device:
        current = counted(hooks, outside, inside)
        device.reads.clear()
        hooks.require_each_once(current)
        assert not device.reads
        current.calls_L.zero_()  # as the next pass of a CUDA graph does
        hooks.checks.wait()
        assert device.reads, "the control: what waits is counted"


@pytest.mark.parametrize(
    ("inside", "said"), [([1, 0], "layer 1 selected 0 times"), ([2, 1], "layer 0 selected 2 times")]
)
def test_a_graph_that_bypassed_a_router_is_told_before_weights_change(hooks, inside, said):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with other_device():
        hooks.require_each_once(counted(hooks, [0, 0], inside))
        with pytest.raises(ReplayError, match=said):
            optimizer.step()


def test_what_the_host_has_seen_twice_is_told_at_once(hooks):
    with other_device(), pytest.raises(ReplayError, match="layer 1 selected 2 times"):
        hooks.require_each_once(counted(hooks, [0, 2], [1, 0]))


def test_routes_for_other_rows_than_the_pass_has_are_refused(hooks):
    with pytest.raises(ReplayError, match=r"the routes are \[1, 3, 2\] \[L, R, K\], the routers select \[2, 3, 2\]"):
        hooks.open_pass(Rows(torch.zeros(1, 3, 2, dtype=torch.int16)), 3, torch.device("cpu"))

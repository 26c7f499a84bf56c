"""Checks that a device answers while the host goes on, such as that every router of a graph selected once."""

from contextlib import nullcontext

import pytest
import torch
import torch._dynamo  # graphs are looked for where it is loaded

from foreroute.core import attach, deferred_checks
from foreroute.core.deferred_checks import DeferredChecks
from foreroute.core.passes import Rows
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import tiny


class There(torch.Tensor):
    """Says that it is on a device that is not the CPU."""

    device = torch.device("meta")


class OnCuda(torch.Tensor):
    device, is_cuda = torch.device("cuda:0"), True


class Event:
    """Of a device that is done when a test says so, recorded on the stream of the device that is asked."""

    done, waited = False, 0

    def record(self, stream):
        assert stream == "of cuda:0"

    def query(self):
        return Event.done

    def synchronize(self):
        Event.waited += 1


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch):
    """What other tests have asked is not waited for here."""
    monkeypatch.setattr(deferred_checks, "_before_step", set())


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(Event, "waited", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    return Event


def flag(*, wrong, on_gpu=False):
    return torch.tensor(wrong).as_subclass(OnCuda if on_gpu else There)


def tell():
    raise BatchMismatchError("another batch")


def test_answers_that_are_there_are_looked_at_when_the_next_pass_begins(gpu, monkeypatch):
    checks = DeferredChecks()
    checks.add(flag(wrong=True, on_gpu=True), tell)
    checks.add(flag(wrong=False, on_gpu=True), lambda: None)
    assert not gpu.waited
    monkeypatch.setattr(gpu, "done", True)
    with pytest.raises(BatchMismatchError, match="another batch"):
        checks.add(flag(wrong=False, on_gpu=True), lambda: None)
    checks.close()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_end_waits_once_and_tells_the_first_that_is_wrong(gpu, on_gpu):
    checks, told = DeferredChecks(), []
    for number, wrong in enumerate((False, True, False)):
        checks.add(flag(wrong=wrong, on_gpu=on_gpu), lambda n=number, wrong=wrong: told.append(n) or (wrong and tell()))
    assert not gpu.waited
    with pytest.raises(BatchMismatchError, match="another batch"):
        checks.wait()
    assert told == [0, 1]
    assert gpu.waited == on_gpu
    checks.wait()
    checks.add(flag(wrong=True, on_gpu=on_gpu), lambda: None)  # that only the device finds wrong
    with pytest.raises(ReplayError, match="passed; please"):
        checks.wait()


def test_an_optimizer_does_not_step_on_a_wrong_batch_of_any_model():
    """Such as of a policy and a critic; torch walks through its hooks meanwhile."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.sum().backward()
    every, told = [DeferredChecks() for _ in range(3)], []
    for number, checks in enumerate(2 * every):
        checks.add(flag(wrong=number == 1), lambda n=number: told.append(n) or tell())
        checks.close()
    assert deferred_checks._before_step == set(every)
    with pytest.raises(BatchMismatchError, match="another batch"):
        optimizer.step()
    assert told == [1]
    assert weight.tolist() == [1, 1]
    optimizer.step()
    assert weight.tolist() == [0, 0]
    assert not deferred_checks._before_step


@pytest.fixture
def hooks():
    """Of two routers; no forward runs in these tests."""
    return attach(tiny("qwen3_moe", num_hidden_layers=2)).hooks


def counted(hooks, outside, inside):
    """A pass whose routers have selected so often outside of graphs, and inside."""
    current = hooks.open_pass(None, 3, DEVICE)
    current.calls = outside
    current.calls_L.copy_(torch.tensor(inside, dtype=torch.int32).to(DEVICE, non_blocking=True))
    return current


def test_a_graph_that_bypassed_a_router_is_told_before_weights_change_and_not_waited_for(hooks):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with other_device() as device:
        for outside, inside, said in (
            ([1, 0], [0, 1], None),
            ([0, 0], [1, 0], r"layers\.1\.mlp\.gate selected 0 times"),
            ([0, 0], [2, 1], r"layers\.0\.mlp\.gate selected 2 times"),
        ):
            current = counted(hooks, outside, inside)
            device.reads.clear()
            hooks.require_each_once(current)
            assert not device.reads
            current.calls_L.zero_()  # as the next pass of a CUDA graph does
            with pytest.raises(ReplayError, match=said) if said else nullcontext():
                optimizer.step()
            assert device.reads, "the control: what waits is counted"
        with pytest.raises(ReplayError, match=r"layers\.1\.mlp\.gate selected 2 times"):
            hooks.require_each_once(counted(hooks, [0, 2], [2, 1]))  # the host has seen it


def test_routes_for_other_rows_than_the_pass_has_are_refused(hooks):
    with pytest.raises(ReplayError, match=r"\[1, 3, 2\] \[L, R, K\].*\[2, 3, 2\]"):
        hooks.open_pass(Rows(torch.zeros(1, 3, 2, dtype=torch.int16)), 3, torch.device("cpu"))

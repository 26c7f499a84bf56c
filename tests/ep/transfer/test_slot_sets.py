"""Slots that are filled again while a backward pass still needs them are refused, never used as they are."""

import contextlib

import pytest
import torch

from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferOptions
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import DTYPE, begin, fetched, hosted, make_engine, walk, weight
from tests.tiers import grid

TIGHT = TransferOptions(paths="host", prefetch=0)
"""With shared slots, one set of slots for all layers: every cell overwrites the one before."""


def kept_for_backward(rank, plan, options, protects=True):
    """Autograd keeps the slots of every cell as they are handed out: the largest difference of what it has of them."""
    engine, homes = make_engine(plan, rank, options)
    uses, loss = [], torch.zeros((), dtype=DTYPE)
    with contextlib.closing(engine), pytest.MonkeyPatch.context() as patch:
        if not protects:
            patch.setattr(torch.autograd.graph, "increment_version", lambda tensor: None)
        begin(engine, 0, plan)
        for layer in range(len(homes)):
            slots = fetched(engine, Cell(0, 0, layer))["down_proj"]
            factor = torch.ones_like(slots, requires_grad=True)
            uses.append((factor, [weight("down_proj", layer, e) for e in hosted(plan.cell(0, layer), rank)]))
            loss = loss + (factor * slots).sum()
        loss.backward()
    return max(float((factor.grad - torch.stack(wanted)).abs().max()) for factor, wanted in uses)


def full_plan(sharing="shared"):
    """Two ranks that serve replicas in neighbouring slots in every cell, so that the engine hands out views."""
    plans = (random_plan(seed, ranks=2, slots=2, micro_steps=1, sharing=sharing) for seed in range(1000))
    return next(plan for plan in plans if all(len(slots) for slots in slots_of_each(plan)))


def slots_of_each(plan):
    return [plan.cell(0, layer).slot_R[plan.cell(0, layer).rank_R == rank] for layer in range(3) for rank in range(2)]


@pytest.mark.parametrize("paths", ["host", "direct"])
def test_a_slot_refilled_before_its_backward_is_refused(workers, paths):
    options = TransferOptions(prefetch=0, paths=paths)
    outcomes = workers(2).outcomes(kept_for_backward, full_plan(), options)
    assert {outcome.kind for outcome in outcomes} == {"RuntimeError"}
    assert all("modified by an inplace operation" in outcome.message for outcome in outcomes)


def test_without_version_counters_it_would_be_silently_wrong(workers):
    options = TransferOptions(prefetch=0, paths="direct")
    assert min(workers(2).run(kept_for_backward, full_plan(), options, False)) > 1e-2


def test_slots_per_layer_need_no_refetch(workers):
    plan = full_plan("layer")
    assert workers(2).run(kept_for_backward, plan, TransferOptions(paths="host")) == [0.0, 0.0]


def step_twice(rank, plan, optimizer):
    """An optimizer step behind which no other step begins, then one behind which it does."""
    engine, homes = make_engine(plan, rank, TIGHT)
    parameters = [p for home in homes for p in home.values()]
    walk(engine, plan, rank)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer](parameters, lr=0.1).step()
    errors = []
    for step in range(2):
        try:
            begin(engine, step, plan)
            fetched(engine, Cell(step, 0, 0))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    engine.close()
    return errors


@grid("optimizer", ["adam", "sgd"], quick=1)
def test_weights_that_change_within_a_step_are_refused(workers, optimizer):
    for errors in workers(2).run(step_twice, full_plan(), optimizer):
        (error,) = errors
        assert error.startswith("TransferError: the home shards of step 0, micro-step 0, routed layer 0 hold other")

"""Slots that are filled again while a backward pass still needs them are refused, never used as they are."""

import contextlib

import pytest
import torch

from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferOptions
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import DTYPE, begin, fetched, make_engine


def kept_for_backward(rank, plan, options):
    """Autograd keeps the slots of every cell as they are handed out."""
    engine, loss = make_engine(plan, rank, options), torch.zeros((), dtype=DTYPE)
    with contextlib.closing(engine):
        begin(engine, 0, plan)
        for layer in range(plan.shape[1]):
            slots = fetched(engine, Cell(0, 0, layer))["down_proj"]
            loss = loss + (torch.ones_like(slots, requires_grad=True) * slots).sum()
        loss.backward()


def full_plan(sharing="shared"):
    """Two ranks that serve replicas in neighbouring slots in every cell, so that the engine hands out views."""
    plans = (random_plan(seed, ranks=2, slots=2, micro_steps=1, sharing=sharing) for seed in range(1000))
    return next(plan for plan in plans if all(len(set(plan.cell(0, layer).rank_R)) == 2 for layer in range(3)))


@pytest.mark.parametrize("paths", ["host", "direct"])
def test_a_slot_refilled_before_its_backward_is_refused(workers, paths):
    """With one set of shared slots, every cell overwrites the one before."""
    outcomes = workers(2).outcomes(kept_for_backward, full_plan(), TransferOptions(prefetch=0, paths=paths))
    assert {outcome.kind for outcome in outcomes} == {"RuntimeError"}
    assert all("modified by an inplace operation" in outcome.message for outcome in outcomes)

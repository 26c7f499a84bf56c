"""Plans on the flex dispatcher: its kernels are told places, and training goes on as if every expert were at home.

Losses and gradients of all splits are in `test_plan_execution`.
"""

import contextlib
from unittest import mock

import pytest

from foreroute.adapters.megatron import flex_kernels as kernels
from foreroute.errors import PlanError
from tests.adapters.megatron import test_replicas_inside as inside
from tests.adapters.megatron.executed_plans import Planned, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell, on_flex
from tests.adapters.megatron.training_step import moe_layers
from tests.trainers.verl.flex_kernels import SEEN

TOLD = Cell(ep=2, layers=2)


def check_cases(cases):
    """None waits, and no row is beyond what was known; without a plan, kernels wait in every cell."""
    with mock.patch.object(inside, "trained", executed_without_waits):
        inside.check_cases(cases)


def executed_without_waits(case, planned, **more):
    SEEN.clear()
    found = trained(case, planned, **more)
    assert SEEN["rows"] > 0
    assert ((SEEN["waits"] > 0), SEEN["over budget"]) == (planned is None, 0), SEEN
    return found


@on_ranks(2)
def test_a_budget_that_is_too_small_is_seen():
    """HybridEP drops the row and says so."""
    at = Planned.of(on_flex("hybridep", TOLD))
    begin = kernels.FlexHandle.__init__

    def short(handle, *given):
        begin(handle, *given)
        handle._num_rows -= 1

    SEEN.clear()
    with contextlib.suppress(RuntimeError), mock.patch.object(kernels.FlexHandle, "__init__", short), at.execute():
        at.step()
    assert SEEN["over budget"] > 0


@on_ranks(2)
def test_other_kernels_are_refused():
    at = Planned.of(on_flex("hybridep", TOLD))
    for layer in moe_layers(at.chunks).values():
        layer.token_dispatcher._comm_manager = object()
        layer.config.moe_flex_dispatcher_backend = "ncclep"
    with pytest.raises(PlanError, match="ncclep"), at.execute():
        pass

"""Plans on the flex dispatcher: its kernels are told places, and training goes on as if every expert were at home."""

import contextlib
from unittest import mock

import pytest
import torch

from foreroute.adapters.megatron import flex_kernels as kernels
from foreroute.ep import execution
from foreroute.ep.places import upload_places
from foreroute.errors import PlanError
from tests.adapters.megatron import test_replicas_inside as inside
from tests.adapters.megatron.executed_plans import Planned, furthest, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import FLEX_BACKENDS, Cell, ExecutionCase
from tests.adapters.megatron.training_step import moe_layers
from tests.trainers.verl.flex_kernels import SEEN

TOLD = ExecutionCase(Cell(ep=2, layers=2))


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


def off_by_one(device, cells, counts_CGE, rank, num_local):
    """The last pick that a home serves of an expert with replicas, in each cell, goes to the first of these."""
    found = upload_places(device, cells, counts_CGE, rank, num_local)
    for places, cell, counts_GE in zip(found, cells, counts_CGE, strict=True):
        begins_E = counts_GE[rank].cumsum() - counts_GE[rank]
        at_home_E = cell.home_tokens_GE(counts_GE)[rank]
        for expert in cell.expert_R:
            last = int(begins_E[expert] + at_home_E[expert])
            if 0 < at_home_E[expert] < counts_GE[rank, expert]:
                places.place_A[last - 1] = places.place_A[last]
    return found


@pytest.mark.slow
@on_ranks(2)
def test_the_comparison_sees_a_pick_that_goes_elsewhere():
    """What is trained is far off, or rows have no room in what was known."""
    for backend in FLEX_BACKENDS:
        case = TOLD.on_flex(backend).in_float64()
        plain = trained(case, None, steps=1)
        assert max(furthest(trained(case, "planned", steps=1), plain).values()) <= inside.EXACT
        with mock.patch.object(execution, "upload_places", off_by_one):
            try:
                apart = furthest(trained(case, "planned", steps=1), plain)["weights"]
            except AssertionError as error:
                if "nobody has all of" not in str(error):
                    raise
                apart = torch.inf  # a budget with a row to spare has undefined memory in it
        assert apart > inside.SEEN, (backend, apart)


@on_ranks(2)
def test_a_budget_that_is_too_small_is_seen():
    """HybridEP drops the row and says so."""
    at = Planned(TOLD.on_flex("hybridep"))
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
    at = Planned(TOLD.on_flex("hybridep"))
    for layer in moe_layers(at.chunks).values():
        layer.token_dispatcher._comm_manager = object()
        layer.config.moe_flex_dispatcher_backend = "ncclep"
    with pytest.raises(PlanError, match="ncclep"), at.execute():
        pass

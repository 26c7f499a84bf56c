"""Plans on the flex dispatcher: its kernels are told places, and training goes on as if every expert were at home.

Losses and gradients of all splits are in `test_plan_execution`.
"""

import contextlib
import dataclasses
from collections import Counter
from importlib.metadata import version
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foreroute.adapters.megatron import flex_kernels as kernels
from foreroute.ep import execution
from foreroute.ep.places import upload_places
from foreroute.errors import PlanError
from foreroute.testing.counting_device import INDICES_ANYWHERE, READS
from tests.adapters.megatron import executed_plans, micro_batches
from tests.adapters.megatron import test_replicas_inside as inside
from tests.adapters.megatron.executed_plans import Planned, furthest, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import FLEX_BACKENDS, Cell, ExecutionCase, on_flex
from tests.adapters.megatron.model_chunks import EXPERTS
from tests.adapters.megatron.test_execution_controls import SEEN as APART
from tests.adapters.megatron.training_step import moe_layers
from tests.trainers.verl.flex_kernels import SEEN, Buffer

MICRO_BATCHES, LAYERS = 2, 2
CELLS = MICRO_BATCHES * LAYERS
TOLD = Cell(ep=2, layers=LAYERS)


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


@pytest.mark.slow
@on_ranks(2)
def test_ranks_of_other_numbers_of_tokens():
    """DeepEP takes them. HybridEP is given padding, as Megatron gives it where it is told to, and nobody asks."""
    packed = micro_batches.PACKED
    there = packed[dist.get_rank() :] + packed[: dist.get_rank()]
    pads = {"moe_hybridep_pad_uneven_dispatch_inputs": True}
    cases = [on_flex("deepep", Cell(ep=2, layers=LAYERS, packed=True))]
    if version("megatron-core") >= "0.19":
        cases.append(on_flex("hybridep", Cell(ep=2, layers=LAYERS, packed=True, settings=tuple(pads.items()))))
    with mock.patch.object(micro_batches, "PACKED", there):
        check_cases([(case, ("planned",)) for case in cases])


@pytest.mark.slow
@on_ranks(2)
def test_hybridep_is_told_numbers_of_places_that_it_takes():
    """Five of a rank are ten, which its kernels refuse."""
    with mock.patch.object(executed_plans, "SLOTS", 1):
        check_cases([(on_flex("hybridep", TOLD), ("planned",))])


@pytest.mark.slow
@on_ranks(2)
def test_home_experts_without_a_row():
    """All tokens pick experts of one rank; replicas on the other are all that it computes, or it computes nothing."""
    packed = dataclasses.replace(TOLD, packed=True)
    first_E = np.where(np.arange(EXPERTS) < EXPERTS // 2, 100.0, 0.0)
    with mock.patch.object(executed_plans, "favoured_LE", return_value=first_E):
        check_cases([(on_flex(backend, packed), ("static", "planned")) for backend in FLEX_BACKENDS])


@pytest.mark.slow
@on_ranks(2)
def test_gates_of_a_router_in_float64_reach_experts_in_bfloat16_as_they_do_without_a_plan():
    for backend in FLEX_BACKENDS:
        cell = dataclasses.replace(TOLD, settings=(("moe_router_dtype", "fp64"),))
        case = on_flex(backend, cell, rounded=True)
        apart = furthest(trained(case, "static", steps=1), trained(case, None, steps=1))
        assert max(apart.values()) == 0, (backend, apart)


class Operators(TorchDispatchMode):
    """Counts operators, and those of them by which the host would wait for a device."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts["all"] += func.namespace == "aten"
        waits = func in READS and (kwargs or {}).get("output_size") is None
        masked = func in INDICES_ANYWHERE and any(each.dtype == torch.bool for each in tree_leaves(args[1:2]))
        self.counts["reads"] += waits or masked
        return func(*args, **(kwargs or {}))


def operators(case, *, executes=True):
    at = Planned.of(case)
    assert at.plan.num_replicas_ML.any()
    with at.execute() if executes else contextlib.nullcontext(), Operators() as seen:
        at.step()
    return seen.counts


@pytest.mark.slow
@on_ranks(2)
def test_a_step_has_no_more_operators_than_one_by_all_to_all_and_waits_for_nothing():
    for recompute in ("none", "uniform"):
        cell = Cell(ep=2, layers=LAYERS, recompute=recompute)
        expected = operators(ExecutionCase(cell))
        for backend in FLEX_BACKENDS:
            SEEN.clear()
            found = operators(on_flex(backend, cell))

            assert found["all"] <= 1.05 * expected["all"], (backend, found, expected)
            assert found["reads"] == expected["reads"], (backend, found, expected)
            assert (SEEN["waits"], SEEN["over budget"]) == (0, 0)
    # the control: without a plan, Megatron reads masks of what DeepEP sent
    assert operators(on_flex("deepep", TOLD), executes=False)["reads"] > expected["reads"]


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
        case = on_flex(backend, TOLD).in_float64()
        plain = trained(case, None, steps=1)
        assert max(furthest(trained(case, "planned", steps=1), plain).values()) <= inside.EXACT
        with mock.patch.object(execution, "upload_places", off_by_one):
            try:
                apart = furthest(trained(case, "planned", steps=1), plain)["weights"]
            except AssertionError as error:
                if "nobody has all of" not in str(error):
                    raise
                apart = torch.inf  # a budget with a row to spare has undefined memory in it
        assert apart > APART, (backend, apart)


@on_ranks(2)
def test_a_budget_that_is_too_small_is_seen():
    """HybridEP drops the row and says so; DeepEP would write beyond its buffer."""
    at = Planned.of(on_flex("hybridep", TOLD))
    begin = kernels.FlexHandle.__init__

    def short(handle, *given):
        begin(handle, *given)
        handle._num_rows -= 1

    SEEN.clear()
    with contextlib.suppress(RuntimeError), mock.patch.object(kernels.FlexHandle, "__init__", short), at.execute():
        at.step()
    assert SEEN["over budget"] > 0
    at = Planned.of(on_flex("deepep", TOLD))
    dispatch = Buffer.dispatch

    def shorter(buffer, *given, num_worst_tokens=0, **named):
        return dispatch(buffer, *given, num_worst_tokens=min(num_worst_tokens, 1), **named)

    with (
        mock.patch.object(Buffer, "dispatch", shorter),
        pytest.raises(AssertionError, match="room"),
        at.execute(),
    ):
        at.step()


@on_ranks(2)
def test_deepep_waits_between_nodes_where_it_takes_no_budget():
    at = Planned.of(on_flex("deepep", TOLD))
    for nodes, waits in ((1, 0), (2, CELLS)):
        SEEN.clear()
        with mock.patch.object(Buffer, "rdma_ranks", nodes), at.execute():
            at.step()
        assert SEEN["waits"] == waits


@on_ranks(2)
def test_picks_of_weight_zero_go_where_the_plan_says():
    send = kernels.FlexHandle.dispatch

    def weightless(handle, hidden_ND, gates_NK):
        return send(handle, hidden_ND, gates_NK * (torch.arange(gates_NK.shape[1]) > 0))

    for backend in FLEX_BACKENDS:
        at = Planned.of(on_flex(backend, TOLD))
        SEEN.clear()
        with mock.patch.object(kernels.FlexHandle, "dispatch", weightless), at.execute():
            losses, gradients = at.step()
        assert SEEN["over budget"] == 0
        assert all(each.isfinite().all() for each in gradients.values())
        assert all(loss == loss for loss in losses)


@on_ranks(2)
def test_other_kernels_are_refused():
    at = Planned.of(on_flex("hybridep", TOLD))
    for layer in moe_layers(at.chunks).values():
        layer.token_dispatcher._comm_manager = object()
        layer.config.moe_flex_dispatcher_backend = "ncclep"
    with pytest.raises(PlanError, match="ncclep"), at.execute():
        pass

"""Plans on the flex dispatcher: its kernels are told places, and training goes on as if every expert were at home.

Losses and gradients of all splits are in `test_plan_execution`.
"""

import contextlib
import dataclasses
from importlib.metadata import version
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from foreroute.adapters.megatron import flex_kernels as kernels
from foreroute.errors import PlanError
from tests.adapters.megatron import executed_plans, micro_batches
from tests.adapters.megatron import test_replicas_inside as inside
from tests.adapters.megatron.executed_plans import Planned, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import FLEX_BACKENDS, Cell, on_flex
from tests.adapters.megatron.model_chunks import EXPERTS
from tests.adapters.megatron.training_step import moe_layers
from tests.trainers.verl.flex_kernels import SEEN, Buffer

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


@pytest.mark.slow
@on_ranks(2)
def test_ranks_of_other_numbers_of_tokens():
    """DeepEP takes them. HybridEP is given padding, as Megatron gives it where it is told to, and nobody asks."""
    packed = micro_batches.PACKED
    there = packed[dist.get_rank() :] + packed[: dist.get_rank()]
    pads = {"moe_hybridep_pad_uneven_dispatch_inputs": True}
    cases = [on_flex("deepep", Cell(ep=2, layers=2, packed=True))]
    if version("megatron-core") >= "0.19":
        cases.append(on_flex("hybridep", Cell(ep=2, layers=2, packed=True, settings=tuple(pads.items()))))
    with mock.patch.object(micro_batches, "PACKED", there):
        check_cases([(case, ("planned",)) for case in cases])


@pytest.mark.slow
@on_ranks(2)
def test_home_experts_without_a_row():
    """All tokens pick experts of one rank; replicas on the other are all that it computes, or it computes nothing."""
    packed = dataclasses.replace(TOLD, packed=True)
    first_E = np.where(np.arange(EXPERTS) < EXPERTS // 2, 100.0, 0.0)
    with mock.patch.object(executed_plans, "favoured_LE", return_value=first_E):
        check_cases([(on_flex(backend, packed), ("static", "planned")) for backend in FLEX_BACKENDS])


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
def test_other_kernels_are_refused():
    at = Planned.of(on_flex("hybridep", TOLD))
    for layer in moe_layers(at.chunks).values():
        layer.token_dispatcher._comm_manager = object()
        layer.config.moe_flex_dispatcher_backend = "ncclep"
    with pytest.raises(PlanError, match="ncclep"), at.execute():
        pass

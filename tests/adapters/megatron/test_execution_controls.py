"""What comparisons of executed plans must see of Megatron's own: each wrong way is far from the static run.

`tests.ep.executor_properties` has what is wrong in any framework.
"""

import types
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from foreroute.adapters.megatron import planned_experts, planned_layer
from foreroute.adapters.megatron.planned_layer import PlannedLayer
from foreroute.adapters.megatron.separate_replicas import SeparateReplicas
from foreroute.ep.execution import PlanExecution, work_of
from foreroute.ep.replicas import Replicas
from tests.adapters.megatron.executed_plans import furthest, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import GROUPED, OVERLAP, Cell, ExecutionCase, with_settings
from tests.adapters.megatron.plan_execution_checks import EXACT, in_float64

SEEN = 1e-6
"""A million times what is let pass."""


def require_seen(case, planned="planned", what="gradients", **broken):
    """Each of these contexts has a step end far from the one with every expert at home."""
    case = in_float64(case)
    plain = trained(case, None, steps=1)
    for name, way in broken.items():
        with way:
            apart = furthest(trained(case, planned, steps=1), plain)
        assert apart[what] > SEEN, f"{name}: {apart}"


@pytest.mark.slow
@on_ranks(4)
def test_gradients_that_are_late_for_their_bucket():
    """Added after the schedule and before gradients are summed over ranks, when buckets have left."""
    case = in_float64(ExecutionCase(Cell(ep=2, layers=2), 4, told=OVERLAP))
    late, add_returned = [], SeparateReplicas.add_returned

    def add_later(self, returned, grads):
        late.append(partial(add_returned, self, returned, grads))
        return [None for _ in self.parameters()]

    def add():
        for adding in late:
            adding()
        late.clear()

    plain = trained(case, None)  # a first step alone does not show it
    # ranks that hold the same experts end with other gradients of them, which is as far as a comparison gets
    with (
        mock.patch.object(SeparateReplicas, "add_returned", add_later),
        pytest.raises(AssertionError, match=r"copies of .* differ|too far"),
    ):
        assert furthest(trained(case, "planned", add), plain)["gradients"] <= SEEN, "too far"


@pytest.mark.slow
@on_ranks(2)
def test_an_expert_that_is_looked_for_in_the_slot_of_another():
    """After homes have moved: two experts of the first rank change places, in all layers."""
    parameters_of = planned_experts.home_parameters

    def swapped(site):
        found = parameters_of(site)
        experts = site.block.experts.local_experts
        experts._modules["0"], experts._modules["1"] = experts[1], experts[0]
        return found

    case = ExecutionCase(Cell(ep=2, layers=2, packed=True))
    require_seen(case, "random", "losses", swapped=mock.patch.object(planned_experts, "home_parameters", swapped))


@pytest.mark.slow
@on_ranks(4)
def test_the_key_of_the_latest_forward():
    """A recomputation that takes the cell of whatever ran last, as a global variable would say. Seen on two stages."""
    latest, begin_pass = [], PlanExecution.begin_pass

    def begin(self, chunk, shard, rows):
        latest[:] = [begin_pass(self, chunk, shard, rows)]
        return latest[0]

    def of_latest(passes, layer, path):
        work = work_of(passes, layer, path)
        return replace(work, cells=latest[0], cell=work.cell._replace(micro_step=latest[0].micro_step))

    with mock.patch.object(PlanExecution, "begin_pass", begin):
        require_seen(
            ExecutionCase(Cell(ep=2, pp=2, layers=2, recompute="selective", dispatcher="allgather"), 4),
            latest=mock.patch.object(planned_layer, "work_of", of_latest),
        )


@pytest.mark.slow
@on_ranks(4)
def test_weights_that_are_sent_before_they_are_gathered():
    told = (*OVERLAP, ("overlap_param_gather", True))
    case = in_float64(ExecutionCase(Cell(ep=2, layers=2), 4, "distributed", told))
    plain = trained(case, None)
    for path in ("direct", "host"):
        apart = furthest(trained(case, "planned", path=path), plain)
        assert max(apart.values()) <= EXACT, (path, apart)
        with mock.patch.object(PlannedLayer, "finish_gathering"):
            apart = furthest(trained(case, "planned", path=path), plain)
        assert apart["losses"] > SEEN, (path, apart)


@pytest.mark.slow
@on_ranks(2)
def test_fused_gradients_and_those_sent_through_autograd():
    """Kernels that add to main_grad make Megatron ignore what autograd brings. In float32, as they are."""
    fuse()
    settings = {"gradient_accumulation_fusion": True}
    case = ExecutionCase(with_settings(settings, ep=2, layers=2, recompute="selective"))
    plain = trained(case, None, steps=1)
    apart = furthest(trained(case, "planned", steps=1), plain)
    assert max(apart.values()) < 1e-4, apart

    with mock.patch.object(SeparateReplicas, "add_returned", through_autograd):
        apart = furthest(trained(case, "planned", steps=1), plain)
    assert apart["gradients"] > 1e-2, apart


@pytest.mark.slow
@on_ranks(2)
def test_experts_in_one_module():
    """Wrong ways behind TEGroupedMLP, whose kernels add gradients of weights to main_grad."""
    require_seen(
        GROUPED["grouped, fused"],
        refilled_behind_a_recomputation=refilled_behind_a_recomputation(),
        through_autograd=mock.patch.object(SeparateReplicas, "add_returned", through_autograd),
    )


def through_autograd(self, returned, grads):
    return [returned.get(name, {}).get(row) for row in range(len(self.home["linear_fc1.weight"])) for name in self.home]


def refilled_behind_a_recomputation():
    """Backward takes what the recomputation before it left in the slots, and other weights are there by then."""
    wait, filled = Replicas.wait, set()

    def refilled(self):
        wait(self)
        if self in filled:
            for rows in self.weights.values():
                rows.zero_()
        filled.add(self)

    return mock.patch.object(Replicas, "wait", refilled)


def fuse():
    """What apex's kernel does, for gradient_accumulation_fusion on the CPU."""
    from megatron.core.tensor_parallel import layers as linear

    def add(rows, grad, main_grad):
        main_grad.add_(grad.t().mm(rows))

    linear._grad_accum_fusion_available = True
    linear.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=add)

"""What plans leave as it was inside Megatron: gradients, checkpoints and memory. And what is spread by them."""

import types
from functools import partial
from unittest import mock

import pytest
import torch

from foreroute.adapters.megatron.planned_layer import PlannedLayer
from foreroute.adapters.megatron.separate_replicas import SeparateReplicas
from foreroute.ep.transfer import engine
from foreroute.ep.transfer.gradients import GradientReturn
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from tests.adapters.megatron import executed_plans
from tests.adapters.megatron.executed_plans import LINKS, SLOTS, Planned, furthest, rows_off_plan, sharded, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import OVERLAP, Cell, ExecutionCase
from tests.adapters.megatron.grid_checks import carrying
from tests.adapters.megatron.training_step import forward_step, step

EXACT, SEEN = 1e-12, 1e-6
"""What is let pass, and a million times as much."""


def check_cases(cases):
    for case, plans in cases:
        case = case.in_float64()
        plain = trained(case, None)
        for planned in plans:
            try:
                check_equal(plain, trained(case, planned), planned)
            except Exception as error:
                raise AssertionError(f"[{case}], {planned}: {error}") from error


def check_equal(plain, executed, planned):
    """Bits without replicas, units of float64 with them; and the plan was carried out."""
    apart = furthest(executed, plain)
    most = 0.0 if planned == "static" else EXACT
    assert max(apart.values()) <= most, f"{apart} away from the run with every expert at home"
    assert executed["off_plan"] == 0, f"{executed['off_plan']} cells computed other numbers of rows than planned"
    assert (executed["replicas"] > 0, executed["moved"] > 0) == (planned != "static", planned == "random")


@pytest.mark.slow
@on_ranks(2)
def test_gradients_lose_nothing_on_their_way_home():
    """Sent in float64 they arrive with the same bits, and sent in bfloat16 only where kernels made them in bfloat16.

    A gradient that is rounded at home, before it is added to main_grad, is the same in bfloat16 as well. That the sums
    are right is shown in float64 by `check_cases`: here the same kernels compute the same groups of rows.
    """
    float32 = {"grad_reduce_in_fp32": True}
    for experts, optimizer, told, made_in in (
        ("sequential", "momentum", {}, torch.float32),
        ("sequential", "master weights", float32, torch.bfloat16),
        ("grouped, fused", "master weights", float32, torch.float32),  # these kernels add to main_grad
    ):
        cell = Cell(ep=2, layers=2, experts=experts)
        case = ExecutionCase(cell, optimizer=optimizer, told=told, rounded=optimizer == "master weights")
        executed = trained(case, "planned", steps=1)
        assert executed["replicas"] > 0
        for sent_as in (torch.float64, torch.bfloat16):
            with mock.patch.object(engine, "GradientReturn", sending_as(sent_as)):
                apart = furthest(trained(case, "planned", steps=1), executed)
            loses = torch.finfo(sent_as).bits < torch.finfo(made_in).bits
            assert (apart["weights"] > 0) == loses, (experts, optimizer, sent_as, apart)


def sending_as(dtype):

    def begin(peers, moves, grads, what, **others):
        return GradientReturn(peers, moves, {name: grad.to(dtype) for name, grad in grads.items()}, what, **others)

    return begin


@pytest.mark.slow
@on_ranks(2)
def test_a_plan_knows_the_rows_that_are_spread():
    """Padding, also when homes moved since it was counted, and rows that no counted token depends on.

    It does not know those that are left to the model, and what is measured of the other rows is the same.
    """
    at = Planned(ExecutionCase(Cell(ep=2, layers=2), complete=False))
    routed, options = at.routed, PlanOptions(tolerance=0.0, slots="shared", home_moves=None)
    for missing, padding in (("spread", "spread"), ("native", "spread"), ("spread", "native")):
        shards = sharded(routed, at.batches, at.traces, missing=missing, padding=padding)
        is_known = missing == padding
        assert all(shard.is_whole for shard in shards) == is_known
        counts_MLGE = routed.gather_counts(shards)
        made = plan(counts_MLGE, Topology(2, 2, SLOTS, LINKS), options, home_LE=routed.home_LE)
        at.chunks[0].zero_grad(set_to_none=True)
        routed.move_homes(made)
        forward = routed.replaying(forward_step, padding=padding, telemetry=True)
        with routed.execute(made, counts_MLGE, shards) as execution:
            step(at.chunks, carrying(at.batches, shards), forward)
        assert (rows_off_plan(routed, execution, counts_MLGE) == 0) == is_known, (missing, padding)
        assert forward.agreement().rows == sum(int(trace.valid_N.sum()) for trace in at.traces)
    assert (routed.home_LE != routed.block_home_LE).any()


@on_ranks(2)
def test_checkpoints_do_not_see_replicas():
    """While a plan is executed, a model has the parameters, state and shards of checkpoints that it has else."""
    for experts in ("sequential", "grouped"):
        at = Planned(ExecutionCase(Cell(ep=2, layers=2, experts=experts)))
        before = kept(at.chunks[0])
        with at.execute() as execution:
            at.step()
            assert kept(at.chunks[0]) == before
        assert any(transfer.operation == "return" for transfer in execution.transfers)


def kept(chunk):
    """What a checkpoint of a model would hold: names, values, and where shards lie in the whole."""
    return (
        [name for name, _ in chunk.named_parameters()],
        {name: None if value is None else value.tolist() for name, value in chunk.state_dict().items()},
        {
            key: (shard.key, getattr(shard, "global_shape", None), getattr(shard, "global_offset", None))
            for key, shard in chunk.sharded_state_dict().items()
        },
    )


@pytest.mark.slow
@on_ranks(4)
def test_gradients_that_are_late_for_their_bucket():
    """Added after the schedule and before gradients are summed over ranks, when buckets have left."""
    case = ExecutionCase(Cell(ep=2, layers=2), 4, told=OVERLAP).in_float64()
    late, add_returned, finalize = [], SeparateReplicas.add_returned, executed_plans.finalize_model_grads

    def add_later(self, returned, grads):
        late.append(partial(add_returned, self, returned, grads))
        return [None for _ in self.parameters()]

    def add_and_finalize(chunks):
        for adding in late:
            adding()
        late.clear()
        finalize(chunks)

    plain = trained(case, None)  # a first step alone does not show it
    # ranks that hold the same experts end with other gradients of them, which is as far as a comparison gets
    with (
        mock.patch.object(SeparateReplicas, "add_returned", add_later),
        mock.patch.object(executed_plans, "finalize_model_grads", add_and_finalize),
        pytest.raises(AssertionError, match=r"copies of .* differ|too far"),
    ):
        assert furthest(trained(case, "planned"), plain)["weights"] <= SEEN, "too far"


@pytest.mark.slow
@on_ranks(4)
def test_weights_that_are_sent_before_they_are_gathered():
    told = {**OVERLAP, "overlap_param_gather": True}
    case = ExecutionCase(Cell(ep=2, layers=2), 4, "distributed", told).in_float64()
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
    case = ExecutionCase(Cell(ep=2, layers=2, recompute="selective", settings=settings))
    plain = trained(case, None, steps=1)
    apart = furthest(trained(case, "planned", steps=1), plain)
    assert max(apart.values()) < 1e-4, apart

    with mock.patch.object(SeparateReplicas, "add_returned", through_autograd):
        apart = furthest(trained(case, "planned", steps=1), plain)
    assert apart["weights"] > 1e-2, apart


def through_autograd(self, returned, grads):
    return [returned.get(name, {}).get(row) for row in range(len(self.home["linear_fc1.weight"])) for name in self.home]


def fuse():
    """What apex's kernel does, for gradient_accumulation_fusion on the CPU."""
    from megatron.core.tensor_parallel import layers as linear

    def add(rows, grad, main_grad):
        main_grad.add_(grad.t().mm(rows))

    linear._grad_accum_fusion_available = True
    linear.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=add)

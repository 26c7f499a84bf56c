"""What plans leave as it was inside Megatron: gradients, checkpoints and memory. And what is spread by them."""

import gc
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from foreroute.ep.replicas import Replicas
from foreroute.ep.transfer import engine
from foreroute.ep.transfer.gradients import GradientReturn
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from tests.adapters.megatron.executed_plans import (
    LINKS,
    SLOTS,
    Planned,
    furthest,
    make_plan,
    rows_off_plan,
    trained,
)
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell, ExecutionCase
from tests.adapters.megatron.grid_checks import carrying
from tests.adapters.megatron.grouped_linear import GroupedLinear
from tests.adapters.megatron.micro_batches import layout_of
from tests.adapters.megatron.model_chunks import TOP_K
from tests.adapters.megatron.training_step import forward_step, step

EXACT = 1e-12


def check_cases(cases):
    for case, kinds in cases:
        case = case.in_float64()
        plain = trained(case, None)
        for planned in kinds:
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
    float32 = (("grad_reduce_in_fp32", True),)
    for experts, kind, told, made_in in (
        ("sequential", "momentum", (), torch.float32),
        ("sequential", "master weights", float32, torch.bfloat16),
        ("grouped, fused", "master weights", float32, torch.float32),  # these kernels add to main_grad
    ):
        cell = Cell(ep=2, layers=2, experts=experts)
        case = ExecutionCase(cell, optimizer=kind, told=told, rounded=kind == "master weights")
        executed = trained(case, "planned", steps=1)
        assert executed["replicas"] > 0
        for sent_as in (torch.float64, torch.bfloat16):
            with mock.patch.object(engine, "GradientReturn", sending_as(sent_as)):
                apart = furthest(trained(case, "planned", steps=1), executed)
            loses = torch.finfo(sent_as).bits < torch.finfo(made_in).bits
            assert (apart["weights"] > 0) == loses, (experts, kind, sent_as, apart)


def sending_as(dtype):
    """Gradients sent home in another dtype than they were made in."""

    def begin(peers, moves, grads, what, **others):
        return GradientReturn(peers, moves, {name: grad.to(dtype) for name, grad in grads.items()}, what, **others)

    return begin


@on_ranks(2)
def test_padding_is_spread_by_the_plan():
    """Counts have it, so that ranks are even with it, and the largest cell of the plan is an exact capacity.

    Padding that is left to the model is in no count, and homes take it beyond what was planned.
    """
    at = Planned.of(ExecutionCase(Cell(ep=2, layers=2)))
    chunks, routed, batches = at.chunks, at.routed, at.batches
    topology = Topology(2, 2, SLOTS, LINKS)
    options = PlanOptions(tolerance=0.0, slots="shared", home_moves=None)
    for padding in ("spread", "native"):
        shards = [
            routed.shard(trace, layout_of(batch), padding=padding)
            for trace, batch in zip(at.traces, batches, strict=True)
        ]
        counts_MLGE = routed.gather_counts(shards)
        made = plan(counts_MLGE, topology, options, home_LE=routed.home_LE)
        chunks[0].zero_grad(set_to_none=True)
        routed.move_homes(made, None)  # padding keeps the experts that it was counted for
        with routed.execute(made, counts_MLGE, shards) as execution:
            step(chunks, carrying(batches, shards), routed.replaying(forward_step, padding=padding))
        executed_GML = [torch.empty_like(torch.from_numpy(execution.executed_ML)) for _ in range(2)]
        dist.all_gather(executed_GML, torch.from_numpy(execution.executed_ML))
        executed_GML = torch.stack(executed_GML).numpy()
        rows_M = [2 * batch.width * len(batch.lengths) * TOP_K for batch in batches]
        assert (executed_GML.sum(0) == np.array(rows_M)[:, None]).all()
        if padding == "spread":
            assert (made.previous_home_LE != made.home_LE).any()
            assert np.array_equal(executed_GML.max(0), made.max_load_ML)
            assert executed_GML.max() == made.max_load_ML.max() <= 1.02 * executed_GML.mean()
        else:
            assert counts_MLGE.sum() < sum(rows_M) * 2
            assert (executed_GML.max(0) > made.max_load_ML).any()


@pytest.mark.slow
@on_ranks(2)
def test_rows_without_a_route_are_spread_by_the_plan():
    """Rows that no counted token depends on: the plan knows them, and what is measured of the others is the same."""
    at = Planned.of(ExecutionCase(Cell(ep=2, layers=2), complete=False))
    routed, batches, traces = at.routed, at.batches, at.traces
    measured, off_plan = [], []
    for missing in ("native", "spread"):
        cut = [routed.shard(t, layout_of(b), missing=missing) for t, b in zip(traces, batches, strict=True)]
        assert all(shard.is_whole == (missing == "spread") for shard in cut)
        made, counts_MLGE, _ = make_plan(routed, None, "planned", 0, cut, None)
        forward = routed.replaying(forward_step, telemetry=True)
        with routed.execute(made, counts_MLGE, cut) as execution:
            step(at.chunks, carrying(batches, cut), forward)
        measured.append(forward.agreement().routing)
        off_plan.append(rows_off_plan(routed, execution, counts_MLGE))
    assert measured[0].rows == measured[1].rows == sum(int(trace.valid_N.sum()) for trace in traces)
    assert (off_plan[0] > 0, off_plan[1]) == (True, 0), off_plan


@on_ranks(2)
def test_checkpoints_do_not_see_replicas():
    """While a plan is executed, a model has the parameters, state and shards of checkpoints that it has else."""
    for experts in ("sequential", "grouped"):
        at = Planned.of(ExecutionCase(Cell(ep=2, layers=2, experts=experts)))
        before = kept(at.chunks[0])
        with at.execute() as execution:
            at.step()
            assert kept(at.chunks[0]) == before
        assert any(transfer.kind == "return" for transfer in execution.transfers)


@on_ranks(2)
def test_modules_of_replicas_are_kept_from_one_execution_to_the_next():
    """Transformer Engine's are dear to make; they are made once for each layer and number, and draw nothing."""
    at = Planned.of(ExecutionCase(Cell(ep=2, layers=2, experts="grouped")))
    made, make = [], GroupedLinear.__init__

    def counted(self, *args, **named):
        state = torch.get_rng_state()
        make(self, *args, **named)
        assert torch.equal(torch.get_rng_state(), state)
        made.append(args[0])

    with mock.patch.object(GroupedLinear, "__init__", counted):
        for _ in range(2):
            with at.execute():
                at.step()
            made.append(None)
    first, second = made[: made.index(None)], made[made.index(None) + 1 : -1]
    assert first
    assert second == []


@pytest.mark.slow
@on_ranks(2)
def test_nothing_of_executions_piles_up():
    """Megatron keeps tensors of a pass, and nodes of autograd lead from them to what executed it: circles for ever."""
    at = Planned.of(ExecutionCase(Cell(ep=2, layers=2)))
    for _ in range(3):
        with at.execute() as execution:
            at.step()
        assert any(transfer.kind == "return" for transfer in execution.transfers)
    # what a first collection frees of autograd holds what a second one finds
    gc.collect()
    gc.collect()
    alive = [type(each) for each in gc.get_objects() if isinstance(each, Replicas | type(execution))]
    assert alive == [type(execution)], alive


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

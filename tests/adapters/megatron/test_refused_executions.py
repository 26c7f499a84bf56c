"""Layers that cannot execute plans, and moves that cannot be made: each is named, on all ranks alike."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from foreroute.adapters.megatron.planned_layer import REFUSED_SETTINGS
from foreroute.ep.transfer.home_moves import MovingLayer
from foreroute.ep.transfer.peers import gather_objects
from foreroute.ep.transfer.transfers import Transfer
from foreroute.errors import PlanError, TransferError
from tests.adapters.megatron.cpu_optimizers import Trained
from tests.adapters.megatron.executed_plans import Planned
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell, ExecutionCase
from tests.adapters.megatron.model_chunks import attached
from tests.adapters.megatron.training_step import moe_layers


@on_ranks(2)
def test_layers_and_settings():
    with refusing("sequential") as (block, refused):
        expert = block.experts.local_experts[0]
        refused(of_class(block.token_dispatcher, "Other"), r"Other, .*alltoall.*flex")
        refused(of_class(block.experts, "Other"), r"experts.*Other.*TEGroupedMLP")
        refused(of_class(expert.linear_fc1, "Other"), r"keeps state.*weights")
        refused(of_class(block, "Other", preprocess=lambda *args: None), r"a preprocess of.*own")
        refused(said(block.token_dispatcher, "tp_size", 2), "a replica is a whole expert")
        refused(said(expert.linear_fc2.weight, "requires_grad", False), r"linear_fc2\.weight.*frozen")
        refused(sharded(expert.linear_fc2), r"linear_fc2\.weight.*FSDP")
        for name in REFUSED_SETTINGS:
            refused(said(block.config, name, 2.0), f"{name}=")


@on_ranks(2)
def test_experts_in_one_module():
    with refusing("grouped") as (block, refused):
        experts = block.experts
        refused(said(experts, "_with_fused_impl", True), "use_transformer_engine_op_fuser is set")
        refused(said(experts, "offload_moe_act", True), "offload_modules names expert_fc1 or moe_act")
        refused(said(experts.linear_fc2.weight2, "requires_grad", False), r"linear_fc2\.weight.*frozen")
        more = {**experts.linear_fc1._parameters, "bias0": torch.nn.Parameter(torch.zeros(2))}
        refused(said(experts.linear_fc1, "_parameters", more), r"experts.*different parameters")


@contextlib.contextmanager
def refusing(experts):
    """(a layer, what asserts that a change to it on rank 1 is refused); behind it, the model executes plans."""
    at = Planned(ExecutionCase(Cell(ep=2, layers=2, experts=experts)), "momentum")

    def refused(broken, reason):
        with (
            broken if dist.get_rank() == 1 else contextlib.nullcontext(),
            pytest.raises(PlanError, match=rf"rank 1: .*decoder.layers.\d.mlp.router .*{reason}"),
            at.execute(),
        ):
            pass

    yield moe_layers(at.chunks)[1], refused
    with at.execute():
        at.step()


@contextlib.contextmanager
def said(part, name, value):
    before, is_there = getattr(part, name, None), hasattr(part, name)
    setattr(part, name, value)
    try:
        yield
    finally:
        setattr(part, name, before) if is_there else delattr(part, name)


def of_class(part, name, **methods):
    return said(part, "__class__", type(name, (type(part),), methods))


def sharded(module):
    mesh = DeviceMesh("cpu", [1], _init_backend=False, _rank=1)
    return said(module, "weight", torch.nn.Parameter(DTensor.from_local(module.weight.detach(), mesh, run_check=False)))


class OtherLayer(MoELayer):
    forward = None


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_be_moved():
    chunks, routed = attached(Cell(ep=2, layers=2))
    block = moe_layers(chunks)[0]
    with mock.patch.object(block.config, "fp8", "e4m3"):
        refused_move(r"fp8.*fp4", routed)
    block.__class__ = OtherLayer
    refused_move(r"a forward of.*own", routed)
    block.__class__ = MoELayer
    trained = Trained(chunks, "adamw")
    block.experts.local_experts[2].linear_fc2.weight.main_grad[0, 0] = dist.get_rank()
    refused_move(r"rank 1: .*gradient.*between", routed, trained)
    block.experts.register_buffer("scale", torch.ones(4))
    refused_move("experts have a buffer, scale", routed)
    block.experts.register_parameter("scales", torch.nn.Parameter(torch.ones(4)))
    del block.experts.scale
    refused_move(r"experts.*scales", routed)


@pytest.mark.slow
@on_ranks(2)
def test_faults_behind_which_nothing_has_moved():
    _, routed = attached(Cell(ep=2, layers=2))
    inner = Transfer.wait

    def fails_on_rank_one(transfer):
        inner(transfer)
        if dist.get_rank():
            raise TransferError("the network is down")

    out_of_memory = mock.Mock(side_effect=torch.OutOfMemoryError("out of memory") if dist.get_rank() else None)
    with mock.patch.object(MovingLayer, "allocate", out_of_memory):
        refused_move(r"none were.*rank 1.*memory", routed)
    with mock.patch.object(Transfer, "wait", fails_on_rank_one):
        refused_move(r"none were.*rank 1.*network", routed)


@on_ranks(2)
def test_gathering_of_weights_must_be_over():
    """With overlap_param_gather, weights of other ranks are stale until they are gathered."""
    chunks, routed = attached(Cell(ep=2, layers=2))
    trained = Trained(chunks, "distributed", overlap_param_gather=True, overlap_grad_reduce=True)
    refused_move("disable_forward_pre_hook", routed, trained)
    for chunk in trained.chunks:
        chunk.disable_forward_pre_hook()
    assert routed.move_homes(1 - routed.home_LE, trained.optimizer) > 0


def refused_move(message, routed, trained=None):
    """On every rank, with one message, and nothing has moved."""
    blocks = moe_layers([part.trunk for part in routed.chunks]).values()
    before = [p.detach().clone() for block in blocks for p in block.experts.parameters()]
    with pytest.raises(TransferError, match=message) as caught:
        routed.move_homes(1 - routed.home_LE, getattr(trained, "optimizer", trained))
    said = gather_objects(str(caught.value), dist.group.WORLD, "comparing")
    assert len(set(said)) == 1, said
    after = [p for block in blocks for p in block.experts.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

"""Layers that cannot execute plans: each is named with its reason, on all ranks alike where one has such a layer."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from foreroute.adapters.megatron.planned_layer import REFUSED_SETTINGS
from foreroute.errors import PlanError
from tests.adapters.megatron.executed_plans import Planned
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell, ExecutionCase
from tests.adapters.megatron.training_step import moe_layers


@on_ranks(2)
def test_layers_and_settings():
    with refusing("sequential") as (block, refused):
        expert = block.experts.local_experts[0]
        refused(of_class(block.token_dispatcher, "Other"), "a Other, .* alltoall, allgather or flex")
        refused(of_class(block.experts, "Other"), "experts are a Other; build the layer with .*TEGroupedMLP")
        refused(of_class(expert.linear_fc1, "Other"), "keeps state for each of its weights")
        refused(of_class(block, "Other", preprocess=lambda *args: None), "with a preprocess of its own")
        refused(said(block.token_dispatcher, "tp_size", 2), "a replica is a whole expert")
        refused(said(expert.linear_fc2.weight, "requires_grad", False), "linear_fc2.weight of its experts is frozen")
        refused(sharded(expert.linear_fc2), "linear_fc2.weight of its experts is sharded by FSDP")
        for name in REFUSED_SETTINGS:
            refused(said(block.config, name, 2.0), f"{name}=")


@on_ranks(2)
def test_experts_in_one_module():
    with refusing("grouped") as (block, refused):
        experts = block.experts
        refused(said(experts, "_with_fused_impl", True), "use_transformer_engine_op_fuser is set")
        refused(said(experts, "offload_moe_act", True), "offload_modules names expert_fc1 or moe_act")
        refused(said(experts.linear_fc2.weight2, "requires_grad", False), "linear_fc2.weight of its experts is frozen")
        more = {**experts.linear_fc1._parameters, "bias0": torch.nn.Parameter(torch.zeros(2))}
        refused(said(experts.linear_fc1, "_parameters", more), "its experts have different parameters")


@contextlib.contextmanager
def refusing(experts):
    """(a layer, what asserts that a change to it on rank 1 is refused); behind it, the model executes plans."""
    at = Planned.of(ExecutionCase(Cell(ep=2, layers=2, experts=experts)), "momentum")

    def refused(broken, reason):
        with (
            broken if dist.get_rank() == 1 else contextlib.nullcontext(),
            pytest.raises(PlanError, match=f"rank 1: the layer of decoder.layers.\\d.mlp.router .*{reason}"),
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

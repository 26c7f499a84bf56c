"""Moves of experts that are refused, on all ranks alike and before anything has moved."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from foreroute.adapters import megatron
from foreroute.ep.transfer.home_moves import MovingLayer
from foreroute.ep.transfer.peers import gather_objects
from foreroute.ep.transfer.transfers import Transfer
from foreroute.errors import TransferError
from tests.adapters.megatron.cpu_optimizers import Trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.model_chunks import attached, build, initialize
from tests.adapters.megatron.training_step import moe_layers

CELL = Cell(ep=2, layers=2)


class OtherLayer(MoELayer):
    """One that may dispatch wherever it likes."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs)


@pytest.mark.slow
@on_ranks(2)
def test_refusals():
    for refusal in (of_gradients, of_layers, of_faults):
        initialize(CELL)
        chunks = build(CELL)
        refusal(megatron.attach(chunks), chunks)


def of_gradients(routed, chunks):
    trained = Trained(chunks, "adamw")
    parameter = some_parameter(chunks)
    if here():
        parameter.main_grad[0, 0] = 1.0
    refused(TransferError, "rank 1: .* has a gradient; move homes between two steps", routed, swapped(routed), trained)


def of_layers(routed, chunks):
    block = moe_layers(chunks)[0]
    with mock.patch.object(block.config, "fp8", "e4m3"):
        refused(TransferError, "run in fp8 or fp4", routed, swapped(routed))
    block.__class__ = OtherLayer
    refused(TransferError, "with a forward of its own", routed, swapped(routed))
    block.__class__ = MoELayer
    block.experts.register_parameter("scale", torch.nn.Parameter(torch.ones(4)))
    refused(TransferError, "experts have scale, of which it is not known whose it is", routed, swapped(routed))


def of_faults(routed, chunks):
    inner = Transfer.wait

    def fails_on_rank_one(transfer):
        inner(transfer)
        if here():
            raise TransferError("the network is down")

    out_of_memory = mock.Mock(side_effect=torch.OutOfMemoryError("out of memory") if here() else None)
    with mock.patch.object(MovingLayer, "allocate", out_of_memory):
        refused(TransferError, "none were: rank 1: out of memory", routed, swapped(routed))
    with mock.patch.object(Transfer, "wait", fails_on_rank_one):
        refused(TransferError, "none were: rank 1: the network is down", routed, swapped(routed))


@on_ranks(2)
def test_gathering_of_weights_must_be_over():
    """With overlap_param_gather, weights of other ranks are stale until they are gathered."""
    chunks, routed = attached(CELL)
    trained = Trained(chunks, "distributed", overlap_param_gather=True, overlap_grad_reduce=True)
    refused(TransferError, "disable_forward_pre_hook", routed, swapped(routed), trained)
    for chunk in trained.chunks:
        chunk.disable_forward_pre_hook()
    assert routed.move_homes(swapped(routed), trained.optimizer) > 0


def here():
    return dist.get_rank()


def swapped(routed):
    return 1 - routed.home_LE


def some_parameter(chunks):
    return moe_layers(chunks)[1].experts.local_experts[2].linear_fc2.weight


def refused(error, message, routed, homes, trained=None):
    """On every rank, with one message, and nothing has moved."""
    blocks = moe_layers([chunk for part in routed.chunks for chunk in [part.trunk]]).values()
    before = [p.detach().clone() for block in blocks for p in block.experts.parameters()]
    with pytest.raises(error, match=message) as caught:
        routed.move_homes(homes, getattr(trained, "optimizer", trained))
    said = gather_objects(str(caught.value), dist.group.WORLD, "comparing")
    assert len(set(said)) == 1, said
    after = [p for block in blocks for p in block.experts.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

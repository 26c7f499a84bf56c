"""Moves of experts that are refused, on all ranks alike and before anything has moved."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from foreroute.ep.transfer.home_moves import MovingLayer
from foreroute.ep.transfer.peers import gather_objects
from foreroute.ep.transfer.transfers import Transfer
from foreroute.errors import TransferError
from tests.adapters.megatron.cpu_optimizers import Trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.model_chunks import attached
from tests.adapters.megatron.training_step import moe_layers

CELL = Cell(ep=2, layers=2)


class OtherLayer(MoELayer):
    """One that may dispatch wherever it likes."""

    forward = None


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_be_moved():
    chunks, routed = attached(CELL)
    block = moe_layers(chunks)[0]
    with mock.patch.object(block.config, "fp8", "e4m3"):
        refused("run in fp8 or fp4", routed)
    block.__class__ = OtherLayer
    refused("with a forward of its own", routed)
    block.__class__ = MoELayer
    trained = Trained(chunks, "adamw")
    block.experts.local_experts[2].linear_fc2.weight.main_grad[0, 0] = dist.get_rank()
    refused("rank 1: .* has a gradient; move homes between two steps", routed, trained)
    block.experts.register_buffer("scale", torch.ones(4))
    refused("experts have a buffer, scale", routed)
    block.experts.register_parameter("scales", torch.nn.Parameter(torch.ones(4)))
    del block.experts.scale
    refused("experts have scales, of which it is not known whose it is", routed)


@pytest.mark.slow
@on_ranks(2)
def test_faults_behind_which_nothing_has_moved():
    _, routed = attached(CELL)
    inner = Transfer.wait

    def fails_on_rank_one(transfer):
        inner(transfer)
        if dist.get_rank():
            raise TransferError("the network is down")

    out_of_memory = mock.Mock(side_effect=torch.OutOfMemoryError("out of memory") if dist.get_rank() else None)
    with mock.patch.object(MovingLayer, "allocate", out_of_memory):
        refused("none were: rank 1: out of memory", routed)
    with mock.patch.object(Transfer, "wait", fails_on_rank_one):
        refused("none were: rank 1: the network is down", routed)


@on_ranks(2)
def test_gathering_of_weights_must_be_over():
    """With overlap_param_gather, weights of other ranks are stale until they are gathered."""
    chunks, routed = attached(CELL)
    trained = Trained(chunks, "distributed", overlap_param_gather=True, overlap_grad_reduce=True)
    refused("disable_forward_pre_hook", routed, trained)
    for chunk in trained.chunks:
        chunk.disable_forward_pre_hook()
    assert routed.move_homes(1 - routed.home_LE, trained.optimizer) > 0


def refused(message, routed, trained=None):
    """On every rank, with one message, and nothing has moved."""
    blocks = moe_layers([chunk for part in routed.chunks for chunk in [part.trunk]]).values()
    before = [p.detach().clone() for block in blocks for p in block.experts.parameters()]
    with pytest.raises(TransferError, match=message) as caught:
        routed.move_homes(1 - routed.home_LE, getattr(trained, "optimizer", trained))
    said = gather_objects(str(caught.value), dist.group.WORLD, "comparing")
    assert len(set(said)) == 1, said
    after = [p for block in blocks for p in block.experts.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

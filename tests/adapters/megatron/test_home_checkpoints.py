"""Checkpoints written and read while experts are away, by runs with other homes and by runs without foreroute."""

import contextlib
import multiprocessing
import shutil
import tempfile
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from foreroute.adapters import megatron
from foreroute.errors import PlacementError
from foreroute.testing.megatron_on_cpu import write_checkpoints_without_server
from tests.adapters.megatron.cpu_optimizers import Trained
from tests.adapters.megatron.executed_plans import everything
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.micro_batches import make_batches
from tests.adapters.megatron.model_chunks import build, initialize
from tests.adapters.megatron.training_step import moe_layers, step

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@pytest.mark.slow
@on_ranks(2)
def test_distributed_checkpoints_are_in_logical_order():
    check_round_trips(Cell(ep=2, layers=2), "float32")


@pytest.mark.slow
@on_ranks(4)
def test_so_are_those_of_a_distributed_optimizer():
    dense_first = Cell(ep=2, layers=2, experts="grouped", settings={"moe_layer_freq": [0, 1]})
    check_round_trips(dense_first, "distributed master weights")


def check_round_trips(cell, optimizer):
    """Megatron alone reads what was written while experts were away, and the other way round; both train on alike."""
    away = Run(cell, optimizer, seed=0, attached=True)
    away.move(1)
    away.train(1)
    away.move(2)
    plain = Run(cell, optimizer, seed=1)
    plain.train(5)
    with folder() as path:
        away.save(path)
        assert away.differing(plain)
        plain.load(path)
        assert away.differing(plain) == []
    assert away.train(3) == plain.train(3)
    plain.train(4)
    with folder() as path:
        plain.save(path)
        assert away.differing(plain)
        away.move(3)
        away.load(path)
        assert away.differing(plain) == []
    assert away.train(6) == plain.train(6)
    assert away.differing(plain) == []


@pytest.mark.slow
@on_ranks(2)
def test_other_formats_are_refused_while_experts_are_away():
    """By name; and what another placement filled is no state dict of this one."""
    run = Run(Cell(ep=2, layers=2), "distributed", seed=0, attached=True)
    [block, *_] = moe_layers([run.model]).values()
    of_experts = {*block.experts.parameters()}
    [part] = [
        part
        for part in run.trained.optimizer.chained_optimizers
        if not of_experts.isdisjoint(parameter for group in part.model_fp32_groups for parameter in group)
    ]
    before = run.model.state_dict()
    run.train(1)
    run.move(1)
    for sharding in ("dp_reshardable", "dp_zero_gather_scatter"):
        with pytest.raises(PlacementError, match=rf"state as {sharding}.*fully_reshardable"):
            run.shards(False, {"distrib_optim_sharding_type": sharding})
    with pytest.raises(PlacementError, match="singleton_local_shards"):
        run.shards(False, FORMAT | {"singleton_local_shards": True})
    with folder() as path:
        run.save(path)
        loaded = dist_checkpointing.load(run.shards(True), path)
        run.move(2)
        for use in (
            run.model.state_dict,
            lambda: run.model.load_state_dict(before),
            lambda: run.trained.optimizer.load_state_dict(loaded["optimizer"]),
            run.trained.optimizer.state_dict,
            part.optimizer.state_dict,
            lambda: run.trained.optimizer.save_parameter_state(f"{path}/state"),
            lambda: part.load_parameter_state_from_dp_zero({}),
        ):
            with pytest.raises(PlacementError, match="rank's memory"):
                use()
        run.routed.move_homes(run.routed.block_home_LE, run.trained.optimizer)
        with pytest.raises(RuntimeError, match="foreroute_homes"):
            run.model.load_state_dict(loaded["model"])
        run.model.load_state_dict(before)
        run.trained.optimizer.load_state_dict(run.trained.optimizer.state_dict())


@pytest.mark.slow
@on_ranks(4)
def test_all_stages_refuse_what_one_cannot_save():
    """Also one without experts, and one whose experts stay: they would wait for the others in the save."""
    for moe_layers_of in ([0, 1], [1, 1]):
        cell = Cell(ep=2, pp=2, layers=2, settings={"moe_layer_freq": moe_layers_of})
        run = Run(cell, "distributed", seed=0, attached=True)
        there_LE, metadata = run.routed.block_home_LE.copy(), FORMAT | {"singleton_local_shards": True}
        there_LE[-1] = there_LE[-1, ::-1]
        run.routed.move_homes(there_LE, run.trained.optimizer)
        with pytest.raises(PlacementError, match="singleton_local_shards"):
            run.model.sharded_state_dict(metadata=metadata)
        run.model.sharded_state_dict(metadata=FORMAT)
        run.routed.move_homes(run.routed.block_home_LE, run.trained.optimizer)
        run.model.sharded_state_dict(metadata=metadata)


class Run:
    def __init__(self, cell, optimizer, seed, attached=False):
        self.cell = cell
        if attached:  # the first of them
            initialize(cell)
        chunks = build(cell, seed)
        self.model = chunks[0]
        self.routed = megatron.attach(chunks) if attached else None
        self.trained = Trained(chunks, optimizer)

    def train(self, seed):
        self.trained.zero_grad()
        losses, _ = step(self.trained.chunks, make_batches(self.cell, seed=seed))
        self.trained.step()
        self.trained.zero_grad()
        return losses

    def move(self, seed):
        home_LE = np.random.default_rng(seed).permuted(self.routed.block_home_LE, axis=1)
        self.routed.move_homes(home_LE, self.trained.optimizer)

    def shards(self, is_loading, metadata=FORMAT):
        metadata = dict(metadata)
        model = {"model": self.model.sharded_state_dict(metadata=metadata)}
        optimizer = self.trained.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {**model, "optimizer": optimizer}

    def save(self, path):
        with children_allowed():
            dist_checkpointing.save(self.shards(False), path)

    def load(self, path):
        loaded = dist_checkpointing.load(self.shards(True), path)
        self.model.load_state_dict(loaded["model"])
        with steps_of_groups():
            self.trained.optimizer.load_state_dict(loaded["optimizer"])
        for part in self.trained.optimizer.chained_optimizers:
            for kept in part.optimizer.state.values():
                kept["step"] = kept["step"].clone()  # Megatron has all parameters count in one tensor of torch's Adam

    def differing(self, other):
        """Keys of experts, with their state, and of other weights that are not the same bit for bit in both."""
        mine, theirs = (everything(run.routed or megatron.attach(run.model), run.trained) for run in (self, other))
        assert mine.keys() == theirs.keys()
        return [key for key in mine if not torch.equal(mine[key], theirs[key])]


def steps_of_groups():
    """Megatron counts steps by group, as Transformer Engine's Adam does, and looks in the checkpoint for torch's."""
    fill = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self, parameter, tensors):
        kept = self._get_main_param_and_optimizer_states(parameter)
        fill(self, parameter, {"step": kept["step"], **tensors})

    return mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", with_step)


@contextlib.contextmanager
def folder():
    """One for all ranks."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    try:
        yield path[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(path[0])


@contextlib.contextmanager
def children_allowed():
    """Megatron writes files with processes of its own, which ranks may not have, since they are daemons.

    They end here: a rank leaves without looking back.
    """
    write_checkpoints_without_server()
    config = multiprocessing.current_process()._config
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = True
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()

"""Experts that move to other homes between steps, and home again before anything is saved; and what cannot be moved."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from foreroute.ep.transfer.peers import gather_objects
from tests.ep.executor_properties import require_said, said_by
from tests.ep.spread_steps import ONE_GROUP, TWO_GROUPS, SpreadStep, differing, sharded
from tests.tiers import grid

RATE, LEAST = 1e-3, 1e-4


def homes(seed, routed):
    return np.random.default_rng(seed).permuted(routed.block_home_LE, axis=1)


def adamw(model):
    return torch.optim.AdamW(sharded(model).parameters(), lr=RATE, eps=LEAST)


def trained(s):
    optimizer = adamw(s.model)
    s.update()
    optimizer.step()
    optimizer.zero_grad()
    sharded(s.model)
    return optimizer


def moments(s, optimizer):
    states = {name: optimizer.state[parameter] for name, parameter in s.model.named_parameters()}
    return {
        f"{name}.{key}": getattr(value, "_local_tensor", value).clone()
        for name, state in states.items()
        for key, value in state.items()
    }


def weights(s):
    """Gathered, in order of ids wherever experts live."""
    return {name: tensor.clone() for name, tensor in s.routed.gather_weights()}


def there_and_back(rank, folder, sizes):
    s = SpreadStep(rank, folder, sizes)
    optimizer = trained(s)
    parameters, here, before = list(s.model.parameters()), weights(s), moments(s, optimizer)
    memory = [p.to_local().data_ptr() for p in parameters]
    assert s.routed.move_homes(homes(2, s.routed).astype(np.int64), optimizer) > 0
    assert not s.routed.home_LE.flags.writeable
    assert differing(before, moments(s, optimizer))
    assert not differing(here, weights(s))
    s.routed.move_homes(s.routed.block_home_LE, optimizer)
    assert not differing(here, weights(s))
    assert not differing(before, moments(s, optimizer))
    assert all(one is other for one, other in zip(parameters, s.model.parameters(), strict=True))
    assert memory == [p.to_local().data_ptr() for p in parameters]


@grid(("num_ranks", "sizes", "family"), [(2, ONE_GROUP, "qwen3_moe"), (4, TWO_GROUPS, "gpt_oss")], quick=1, day=1)
def test_what_moves_and_comes_back_has_its_bits_and_its_memory(workers, folder_of, num_ranks, sizes, family):
    workers(num_ranks).run(there_and_back, folder_of(family), sizes)


AWAY = {
    "state_dict": lambda s, optimizer, folder: s.model.state_dict(),
    "load_state_dict": lambda s, optimizer, folder: s.model.load_state_dict({}, strict=False),
    "save_pretrained": lambda s, optimizer, folder: s.model.save_pretrained(folder),
    "distributed": lambda s, optimizer, folder: s.model.save_pretrained(folder, distributed_checkpoint=True),
    "optimizer.state_dict": lambda s, optimizer, folder: optimizer.state_dict(),
    "get_model_state_dict": lambda s, optimizer, folder: get_model_state_dict(s.model),
    "get_optimizer_state_dict": lambda s, optimizer, folder: get_optimizer_state_dict(s.model, optimizer),
}
"""What saves or loads, which is refused while experts are away."""


def saving_away(rank, folder, target):
    s = SpreadStep(rank, folder)
    optimizer = trained(s)
    s.routed.move_homes(homes(2, s.routed), optimizer)
    said = "PlacementError: call routed.move_homes(routed.block_home_LE, optimizer) before"
    require_said(said_by(optimizer.load_state_dict, {}), said)
    for name, do in AWAY.items():
        require_said(said_by(do, s, optimizer, target / f"{name} away"), said)
    s.routed.move_homes(s.routed.block_home_LE, optimizer)
    for name, do in AWAY.items():
        assert said_by(do, s, optimizer, target / name) == "nothing"


@pytest.mark.slow
def test_nothing_is_saved_or_loaded_while_experts_are_away(workers, folder_of, tmp_path):
    workers(2).run(saving_away, folder_of(), tmp_path)


def immovable(rank, folder):
    """Each thing that is wrong, on a rank or on all, is told on all of them, and nothing moves."""
    s = SpreadStep(rank, folder, slots=0)
    experts, before = list(s.routed.spread.layers[0].parameters().values()), weights(s)

    def refused(said, optimizer, given=1 - s.routed.home_LE):
        found = said_by(partial(s.routed.move_homes, given, optimizer))
        require_said(found, said)
        assert gather_objects(found, dist.group.WORLD, "comparing") == [found] * 2
        assert not differing(before, weights(s))

    optimizer = torch.optim.Adam(sharded(s.model).parameters())
    refused("PlanError: rank 1: ", optimizer, [[0, 1], [0]] if rank else s.routed.home_LE[:, ::-1])
    stranger = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    refused("TransferError: _proj of routed layer 0 is no parameter of the optimizer", stranger)
    for each in experts:
        each.grad = torch.zeros_like(each)
    refused("TransferError: rank 0: gate_up_proj of routed layer 0 has a gradient; call zero_grad", optimizer)
    if rank:
        optimizer.step()
    optimizer.zero_grad()
    refused("TransferError: Step the optimizer on all ranks or on none", optimizer)
    optimizer = torch.optim.Adam(experts)
    if rank:
        optimizer.state[experts[0]]["scales"] = torch.zeros(17)
    refused("TransferError: rank 1: gate_up_proj, scales of routed layer 0 has shape (17,), expected 4 rows", optimizer)


def test_what_cannot_be_moved_is_refused_on_all_ranks_and_nothing_moves(workers, folder_of):
    workers(2).run(immovable, folder_of())

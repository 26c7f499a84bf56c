"""Experts that move to other homes between steps, and home again before anything is saved.

Each test stands behind the function that worker processes run for it.
"""

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from foreroute.errors import PlacementError
from tests.ep.spread_models import sharded
from tests.ep.spread_steps import ONE_GROUP, TWO_GROUPS, SpreadStep, differing, weights
from tests.tiers import grid

RATE, LEAST = 1e-3, 1e-4


def homes(seed, routed):
    return np.random.default_rng(seed).permuted(routed.block_home_LE, axis=1)


def adamw(model):
    return torch.optim.AdamW(sharded(model).parameters(), lr=RATE, eps=LEAST)


def moments(s, optimizer):
    """On this rank."""
    found = {}
    for name, parameter in s.model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = getattr(value, "_local_tensor", value).clone()
    return found


def there_and_back(rank, folder, sizes):
    """Whether experts moved; weights and moments with other bits while they are away and when they are back."""
    s = SpreadStep(rank, folder, sizes)
    optimizer = adamw(s.model)
    s.update()
    optimizer.step()
    optimizer.zero_grad()
    sharded(s.model)
    here, before = weights(s.routed), moments(s, optimizer)
    parameters = list(s.model.parameters())
    memory = [p.to_local().data_ptr() for p in parameters]
    received = s.routed.move_homes(homes(2, s.routed).astype(np.int64), optimizer)
    away, locals_away = weights(s.routed), differing(before, moments(s, optimizer))
    s.routed.move_homes(s.routed.block_home_LE, optimizer)
    back, after = weights(s.routed), moments(s, optimizer)
    same_objects = all(one is other for one, other in zip(parameters, s.model.parameters(), strict=True))
    same_memory = memory == [p.to_local().data_ptr() for p in parameters]
    found = differing(here, away), differing(here, back), differing(before, after)
    return received > 0 and not s.routed.home_LE.flags.writeable, bool(locals_away), found, same_objects, same_memory


@grid(("num_ranks", "sizes", "family"), [(2, ONE_GROUP, "qwen3_moe"), (4, TWO_GROUPS, "gpt_oss")], quick=1, day=1)
def test_what_moves_and_comes_back_has_its_bits_and_its_memory(workers, folder_of, num_ranks, sizes, family):
    for *moved, differ, same_objects, same_memory in workers(num_ranks).run(there_and_back, folder_of(family), sizes):
        assert moved == [True, True]
        assert differ == ([], [], []), "gathered weights are in order of ids wherever experts live"
        assert same_objects
        assert same_memory


AWAY = {
    "state_dict": lambda s, optimizer, folder: s.model.state_dict(),
    "load_state_dict": lambda s, optimizer, folder: s.model.load_state_dict({}, strict=False),
    "save_pretrained": lambda s, optimizer, folder: s.model.save_pretrained(folder),
    "distributed": lambda s, optimizer, folder: s.model.save_pretrained(folder, distributed_checkpoint=True),
    "optimizer.state_dict": lambda s, optimizer, folder: optimizer.state_dict(),
    "optimizer.load_state_dict": lambda s, optimizer, folder: optimizer.load_state_dict({}),
    "get_model_state_dict": lambda s, optimizer, folder: get_model_state_dict(s.model),
    "get_optimizer_state_dict": lambda s, optimizer, folder: get_optimizer_state_dict(s.model, optimizer),
}
"""What saves or loads, which is refused while experts are away."""


def saving_away(rank, folder, target):
    """How each ends, while experts are away and, but for loading nothing into an optimizer, when they are back."""
    s = SpreadStep(rank, folder)
    optimizer, found = adamw(s.model), {}
    s.update()
    optimizer.step()
    optimizer.zero_grad()
    for home_LE in (homes(2, s.routed), s.routed.block_home_LE):
        s.routed.move_homes(home_LE, optimizer)
        for name, do in AWAY.items():
            if name == "optimizer.load_state_dict" and name in found:
                continue
            try:
                do(s, optimizer, target / f"{name} {len(found)}")
                found.setdefault(name, []).append("done")
            except PlacementError as error:
                found.setdefault(name, []).append(str(error))
    return found


@pytest.mark.slow
def test_nothing_is_saved_or_loaded_while_experts_are_away(workers, folder_of, tmp_path):
    for found in workers(2).run(saving_away, folder_of(), tmp_path):
        for name, (away, *back) in found.items():
            assert "call routed.move_homes(routed.block_home_LE, optimizer) before" in away, name
            assert back == ["done"] * (name != "optimizer.load_state_dict"), name

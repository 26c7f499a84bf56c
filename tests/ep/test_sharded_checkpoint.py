"""A placed model and its optimizer, saved on 4 ranks with torch.distributed.checkpoint and loaded on 2."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from foreroute.adapters import hf
from foreroute.testing.memory import peak_of
from foreroute.testing.models import tiny
from tests.ep.test_pretrained import LARGE
from tests.ep.training import with_lora
from tests.ep.transfer.plans import random_homes
from tests.tiers import grid

MOMENTS = ("exp_avg", "exp_avg_sq")


def homes(model, seed):
    """Of no order, so that a rank has experts from everywhere."""
    rng, layers = np.random.default_rng(seed), sum(name.endswith("experts") for name, _ in model.named_modules())
    return np.stack([random_homes(rng, 8, dist.get_world_size()) for _ in range(layers)])


def model_of(family, seed, dtype, dense):
    model = tiny(family, seed=seed).to(dtype)
    return with_lora(model) if dense == "adapted" else model


def placed_with(family, seed, dtype, dense):
    model = model_of(family, seed, dtype, dense)
    placed = hf.distribute(model, home_LE=homes(model, seed), timeout_s=20)
    if dense == "fsdp2":
        placed.shard_dense()
    return placed, torch.optim.AdamW(placed.model.parameters(), lr=1e-2)


def whole(placed, optimizer):
    """Weights and moments of all ranks, by name; gathered, which is the other way to them."""
    found = dict(placed.state_dict())
    for name, parameter in placed.model.named_parameters():
        if not parameter.requires_grad:
            continue
        for key in MOMENTS:
            found[f"{name}.{key}"] = placed.whole(parameter, optimizer.state[parameter][key])
        found[f"{name}.step"] = optimizer.state[parameter]["step"].clone()
    return found


def save(rank, folder, family, dtype, dense):
    """Behind two steps of Adam, on gradients that differ from expert to expert."""
    placed, optimizer = placed_with(family, 1, dtype, dense)
    tokens = torch.randint(1, 32, (2, 16), generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        placed.model(input_ids=tokens, use_cache=False).logits.logsumexp(-1).sum().backward()
        placed.sum_gradients()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(placed.checkpoint_state(optimizer), checkpoint_id=folder)
    return whole(placed, optimizer)


def load(rank, folder, family, dtype, dense):
    """Into a model of other weights and homes, on other ranks."""
    placed, optimizer = placed_with(family, 2, dtype, dense)
    dcp.load(placed.checkpoint_state(optimizer), checkpoint_id=folder)
    return whole(placed, optimizer)


@grid(
    ("family", "dtype", "dense"),
    [
        ("qwen3_moe", torch.float32, "whole"),
        ("gpt_oss", torch.bfloat16, "whole"),
        ("qwen3_moe", torch.float32, "fsdp2"),
        ("gpt_oss", torch.float32, "adapted"),
    ],
    quick=1,
)
def test_what_four_ranks_save_two_load_bit_for_bit(workers, tmp_path, family, dtype, dense):
    saved = workers(4).run(save, tmp_path, family, dtype, dense)[0]
    for loaded in workers(2).run(load, tmp_path, family, dtype, dense):
        assert loaded.keys() == saved.keys()
        assert [name for name, tensor in saved.items() if not torch.equal(tensor, loaded[name])] == []
    moments = [tensor for name, tensor in saved.items() if ".experts." in name and name.endswith(".exp_avg")]
    assert any(tensor.abs().sum() > 0 for tensor in moments)
    plain = model_of(family, 3, dtype, dense)
    state = plain.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in state.items()), "and one process loads it whole"


def shares(rank, folder):
    """By how much memory grows at most while a share is saved and loaded, over the share."""
    placed = hf.distribute_pretrained(folder, timeout_s=60)
    share = sum(parameter.nbytes for parameter in placed.model.parameters())
    state = placed.checkpoint_state()
    for _ in range(2):  # what is imported and allocated once
        _, saving = peak_of(lambda: dcp.save(state, checkpoint_id=folder / "dcp"))
        _, loading = peak_of(lambda: dcp.load(state, checkpoint_id=folder / "dcp"))
        dist.barrier()
    return saving / share, loading / share


@pytest.mark.slow
def test_no_rank_holds_more_than_some_tensors_beside_its_share(workers, tmp_path):
    hf.build_model("qwen3_moe", seed=0, **LARGE).save_pretrained(tmp_path)
    for figures in workers(4).run(shares, tmp_path):
        assert max(figures) < 0.8, "bytes of a file and the tensor in them, 0.22 each; the whole model would be 4"

"""A folder of which every rank reads its own experts, and that all write, is the model that is distributed whole.

Each test stands behind the function that worker processes run for it.
"""

from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foreroute.adapters import hf
from foreroute.adapters.hf.local_models import load_local, load_pretrained
from foreroute.errors import ConfigError
from foreroute.testing.memory import peak_of
from foreroute.testing.models import FAMILIES, tiny
from tests.ep.test_state_dict import home_LE
from tests.tiers import grid

LARGE = FAMILIES["qwen3_moe"] | {"num_experts": 16, "hidden_size": 512, "moe_intermediate_size": 512}
"""Experts of 3 MB, whose weights are nearly all that a model has."""
SPREAD_OVER = 4


def loaded(rank, folder, family):
    """Whether weights, and routes and logits of a forward, are those of the same model distributed whole."""
    whole = tiny(family, seed=1)
    expected = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    placed = hf.distribute_pretrained(folder, timeout_s=20)
    state = placed.state_dict()
    same = state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    logits, routes = [], []
    for model in (placed.model, hf.distribute(whole, timeout_s=20).model):
        with hf.attach(model.eval()).record() as recording, torch.no_grad():
            logits.append(model(input_ids=torch.arange(1 + rank, 9 + rank)[None], use_cache=False).logits)
        routes.append(recording.trace().expert_ids_NLK)
    return same, torch.equal(*logits) and np.array_equal(*routes)


@grid("family", FAMILIES, quick=1)
def test_what_is_loaded_is_what_is_distributed(workers, tmp_path, family):
    tiny(family, seed=1).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert workers(2).run(loaded, tmp_path, family) == [(True, True)] * 2


def peak(rank, folder):
    """Of loading, over the bytes of what this rank holds afterwards; and of the whole model over the same."""
    hf.distribute_pretrained(folder, timeout_s=60)  # what is imported and allocated once
    placed, most = peak_of(lambda: hf.distribute_pretrained(folder, timeout_s=60))
    share = sum(parameter.nbytes for parameter in placed.model.parameters())
    del placed
    _, whole = peak_of(lambda: load_pretrained(folder, experts_implementation="eager"))
    return most / share, whole / share


@pytest.mark.slow
def test_no_rank_holds_more_than_its_share(workers, tmp_path):
    hf.build_model("qwen3_moe", seed=0, **LARGE).save_pretrained(tmp_path)
    for own, whole in workers(SPREAD_OVER).run(peak, tmp_path):
        assert own < 1.3, "a share, and a tensor of it, here 0.22, that is put together from those of single experts"
        assert whole > 3, "the measure sees a model that is loaded whole"


def load(rank, folders):
    hf.distribute_pretrained(folders[rank % len(folders)], timeout_s=20)


def test_folders_that_are_not_one_model_are_refused_on_every_rank(workers, tmp_path):
    whole, short, other = (tmp_path / name for name in ("whole", "short", "other"))
    tiny("qwen3_moe", seed=1).save_pretrained(whole)
    tiny("qwen3_moe", seed=2).save_pretrained(other)
    tiny("qwen3_moe", seed=1).save_pretrained(short)
    file = short / "model.safetensors"
    # the second of two ranks has experts 4 to 7
    kept = {name: tensor for name, tensor in load_file(file).items() if "layers.1.mlp.experts.6.down" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    for folders, kind, message in (
        ([short], "ConfigError", "rank 1: the weights in"),
        ([whole, tmp_path / "nothing"], "ConfigError", "rank 1: there is nothing at"),
        ([whole, other], "AttachError", "ranks differ in"),
    ):
        first, second = workers(2).outcomes(load, folders)
        assert (first.kind, first.message) == (second.kind, second.message)
        assert (first.kind, first.message.startswith(message)) == (kind, True), first
    assert workers(2).outcomes(load, [whole]) == [None, None]


def saved(rank, folder, family):
    """How saving under homes of no order ends, in a good place and in bad ones, and whether it loads again."""
    placed = hf.distribute(tiny(family, seed=1), home_LE=home_LE(family, 2), timeout_s=20)
    ended = []
    with (
        mock.patch.object(type(placed.model), "save_pretrained", side_effect=ValueError("no room")),
        pytest.raises(ConfigError, match=r"rank 0: .* cannot be written \(no room\); name a new folder"),
    ):
        hf.save_pretrained(placed, folder)
    for target in (folder.parent / "nowhere" / "model", folder, folder):
        try:
            hf.save_pretrained(placed, target)
            ended.append("saved")
        except Exception as error:
            ended.append(f"{type(error).__name__}: {error}")
    again = hf.distribute_pretrained(folder, timeout_s=20).state_dict()
    return ended, all(torch.equal(again[name], tensor) for name, tensor in placed.state_dict().items())


@grid("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"], quick=1)
def test_ranks_write_the_folder_of_the_whole_model(workers, tmp_path, family):
    plain, folder = tiny(family, seed=1), tmp_path / "model"
    for ended, same in workers(2).run(saved, folder, family):
        assert same
        assert ended[1] == "saved"
        assert ended[0].startswith("ConfigError: rank 0: ")
        assert "No such file" in ended[0]
        assert ended[2].endswith("(it is there already); name a new folder with room for it")
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is left of the refused"
    plain.save_pretrained(tmp_path / "plain")
    ours, theirs = (
        {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for path in (folder, tmp_path / "plain")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    model, had_weights = load_local(folder)
    assert had_weights
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())

"""Runs that train adapters: what moves, what the engine gets, and that they resume."""

import sys

import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import ConfigError
from foreroute.train import Watcher, load_checkpoint, train
from tests.models import tiny
from tests.train.expert_parallel_steps import scored_by_tokens
from tests.train.small_runs import records, same_state, small_config


def run_config(**rl):
    return small_config(
        model={"lora": {"rank": 4}}, rl={"steps": 2, **rl}, warm_start={"max_steps": 2}, checkpoint={"every": 1}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "run"
    with scored_by_tokens():
        return train(run_config(routing="none", router="frozen", kl_coefficient=0.1, learning_rate=1e-2), folder)


def test_adapters_alone_are_trained(run):
    first, last = (load_checkpoint(run.path / "checkpoints" / f"step-00000{n}.safetensors")["model"] for n in (0, 2))
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    adapters = {name for name in first if ".lora_" in name}
    assert len(adapters) == 2 * 2 * 4, "A and B of four layers in two blocks"
    assert moved
    assert moved <= adapters
    assert all(not first[name].any() for name in adapters if ".lora_B." in name)


def test_the_reference_is_the_model_without_adapters(run):
    steps = records(run.path)
    assert abs(steps[0]["kl"]) < 1e-6
    assert steps[1]["kl"] > 1e-6


def test_a_run_is_resumed_to_the_bit_and_trains_routers_on_request(run, tmp_path):
    config, seen = run_config(), []
    with scored_by_tokens():
        whole = train(config, tmp_path / "whole")
        train(config, tmp_path / "stopped", watcher=Watcher(on_step=seen.append, should_stop=lambda: len(seen) == 1))
        resumed = train(config, tmp_path / "stopped", resume=True)
    assert records(resumed.path) == records(whole.path)
    last = load_checkpoint(whole.last_checkpoint())
    assert same_state(load_checkpoint(resumed.last_checkpoint()), last)
    first = load_checkpoint(whole.path / "checkpoints" / "step-000000.safetensors")["model"]
    moved = {name for name in first if not torch.equal(first[name], last["model"][name])}
    assert {name for name in moved if ".lora_" not in name} == {f"model.layers.{n}.mlp.gate.weight" for n in (0, 1)}


def test_merged_weights_are_those_of_a_plain_model():
    adapted, plain = tiny("qwen3_moe").double(), tiny("qwen3_moe", seed=1).double()
    hf.add_lora(adapted, rank=4, alpha=8.0, targets=["q_proj", "v_proj"], seed=0)
    adapted.double()
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if ".lora_B." in name:
                weight.normal_(generator=torch.Generator().manual_seed(0))
        expected = adapted(input_ids=tokens).logits
        plain.load_state_dict(hf.merged(adapted.state_dict(), adapted))
        torch.testing.assert_close(plain(input_ids=tokens).logits, expected, rtol=1e-10, atol=1e-10)
        plain.load_state_dict(hf.without_lora(adapted.state_dict()))
        assert (plain(input_ids=tokens).logits - expected).abs().max() > 1e-3


def test_what_cannot_be_adapted_is_explained(monkeypatch):
    options = {"rank": 4, "alpha": 8.0, "seed": 0}
    with pytest.raises(ConfigError, match=r"targets = \['nothing'\] cannot be adapted .* k_proj, lm_head, o_proj"):
        hf.add_lora(tiny("qwen3_moe"), targets=["nothing"], **options)
    with pytest.raises(ConfigError, match=r"\(there is no v_prj\); linear layers of this model are k_proj"):
        hf.add_lora(tiny("qwen3_moe"), targets=["q_proj", "v_prj"], **options)
    with pytest.raises(ConfigError, match=r"cannot be adapted \(Target module Qwen3MoeSparseMoeBlock"):
        hf.add_lora(tiny("qwen3_moe"), targets=["mlp"], **options)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="needs peft, which is not installed: pip install peft"):
        hf.add_lora(tiny("qwen3_moe"), targets=["q_proj"], **options)
    with pytest.raises(ConfigError, match="targets changes nothing without adapters; set rank"):
        small_config(model={"lora": {"targets": ["q_proj"]}})
    with pytest.raises(ConfigError, match=r"model\.lora\.dropout: unknown key"):
        small_config(model={"lora": {"dropout": 0.1}})

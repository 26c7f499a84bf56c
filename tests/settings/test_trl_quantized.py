"""Adapters on a quantized policy train under TRL with R3 as they do under TRL alone."""

import pytest
import torch
import trl
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from examples.trl.tiny import policy
from foreroute.trainers.trl import GRPOTrainer
from tests.settings.test_quantized import FORMS
from tests.trainers.trl.tools_runs import told_apart
from tests.trainers.trl.trl_runs import logged, make


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    policy().save_pretrained(folder)
    return folder


def trained(saved, folder, config, kind, **settings):
    """The trainer at the end, and its adapters' parameters before and after a step."""
    model = AutoModelForCausalLM.from_pretrained(
        saved, quantization_config=config, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    run = {"max_steps": 1, "learning_rate": 0.1, "optim": "sgd", "reward_funcs": told_apart}
    trainer = make(folder, kind=kind, model=model, peft_config=adapters, **run, **settings)
    parameters = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
    before = {name: each.detach().clone() for name, each in parameters.items()}
    trainer.train()
    return trainer, before, parameters


@pytest.mark.slow
@pytest.mark.shows("TRL", "QLoRA, LoRA on 8 bits, and on torchao's int8")
@pytest.mark.parametrize("form", FORMS)
def test_adapters_of_quantized_policies_are_trained_as_by_trl_alone(form, saved, tmp_path):
    _, before, alone = trained(saved, tmp_path / "alone", form(), trl.GRPOTrainer)
    native, *_ = trained(saved, tmp_path / "native", form(), GRPOTrainer, replay="none")
    trainer, _, ours = trained(saved, tmp_path / "R3", form(), GRPOTrainer, replay="R3")
    assert len(ours) == 18
    for name, expected in alone.items():
        assert not torch.equal(ours[name], before[name]), name
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-6)
    assert logged(trainer, "mismatch/disagreement") == [0]
    # bitsandbytes has another kernel where no gradient is asked for: it is as far off without replay
    (k3,) = logged(trainer, "mismatch/k3")
    assert logged(native, "mismatch/k3") == [k3]

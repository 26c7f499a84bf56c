"""Models whose attention is quantized, with adapters, are replayed and trained by TRL as without foreroute."""

from functools import partial

import pytest
import torch
import trl
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from examples.trl import tiny
from foreroute.trainers.trl import GRPOTrainer
from tests.settings.comparing import needs, policy, require_replayed, with_lora
from tests.trainers.trl.tools_runs import told_apart
from tests.trainers.trl.trl_runs import logged, make


def int8():
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


FORMS = [
    pytest.param(partial(BitsAndBytesConfig, load_in_8bit=True), id="8-bit", marks=needs("bitsandbytes")),
    pytest.param(partial(BitsAndBytesConfig, load_in_4bit=True), id="4-bit", marks=needs("bitsandbytes")),
    pytest.param(int8, id="int8", marks=needs("torchao")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    policy().save_pretrained(path)
    return path


@pytest.mark.shows("Hugging Face", "QLoRA, LoRA on 8 bits, and on torchao's int8")
@pytest.mark.parametrize("form", FORMS)
def test_quantized_models_with_adapters(form, folder):
    def make():
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=form(), dtype=torch.bfloat16, trust_remote_code=False, use_safetensors=True
        )
        weight_class = type(model.model.layers[0].self_attn.q_proj.weight).__name__
        assert weight_class in ("Int8Params", "Params4bit", "Int8Tensor"), weight_class
        return with_lora(model)

    require_replayed(make)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    tiny.policy().save_pretrained(folder)
    return folder


def trained(saved, folder, config, cls, **settings):
    """The trainer at the end, and its adapters' parameters before and after a step."""
    model = AutoModelForCausalLM.from_pretrained(
        saved, quantization_config=config, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    run = {"max_steps": 1, "learning_rate": 0.1, "optim": "sgd", "reward_funcs": told_apart}
    trainer = make(folder, cls=cls, model=model, peft_config=adapters, **run, **settings)
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

"""Models whose attention is quantized, with adapters, are replayed as they are without foreroute."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.settings.comparing import (
    needs,
    policy,
    require_replayed,
    with_lora,
)


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
        kind = type(model.model.layers[0].self_attn.q_proj.weight).__name__
        assert kind in ("Int8Params", "Params4bit", "Int8Tensor"), kind
        return with_lora(model)

    require_replayed(make)

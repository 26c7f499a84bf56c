"""Models whose attention is quantized, with adapters, are replayed as they are without foreroute."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from foreroute.adapters import hf
from foreroute.core import untouched
from tests.adapters.hf.model_runs import force_by_hand, gradients
from tests.settings.comparing import (
    loss_of_batch,
    needs,
    policy,
    require_replayed,
    require_same_gradients,
    with_lora,
)


def int8():
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


NESTED = partial(BitsAndBytesConfig, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
FORMS = [
    pytest.param(partial(BitsAndBytesConfig, load_in_8bit=True), id="8-bit", marks=needs("bitsandbytes")),
    pytest.param(partial(BitsAndBytesConfig, load_in_4bit=True), id="4-bit", marks=needs("bitsandbytes")),
    pytest.param(NESTED, id="4-bit, nested", marks=needs("bitsandbytes")),
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


@needs("bitsandbytes")
@pytest.mark.parametrize("mended", [True, False])
def test_a_rollout_in_eval_mode_leaves_what_trains_adapters(mended, folder, monkeypatch):
    """Where the processor has AVX512-BF16, bitsandbytes packs 4-bit weights there for a kernel without a backward."""
    if not mended:
        monkeypatch.setattr(untouched._Values, "put_back", lambda held: None)

    def make():
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=NESTED(), trust_remote_code=False, use_safetensors=True
        )
        return with_lora(model).train()

    model, twin, plain = make(), make(), make().eval()
    with torch.no_grad():
        loss_of_batch(plain)
    if not any(map(is_packed, plain.parameters())):
        pytest.skip("bitsandbytes packs no weights on this processor, as it has no AVX512-BF16")
    routed = hf.attach(model)
    with torch.no_grad(), routed.record() as recording:
        loss_of_batch(model.eval())
    with routed.replay(recording.trace()):
        loss_of_batch(model.train()).backward()
    assert any(map(is_packed, model.parameters())) != mended
    force_by_hand(twin, recording.trace().expert_ids_NLK)
    loss_of_batch(twin).backward()
    if mended:
        require_same_gradients(model, twin)
    else:
        assert gradients(model).keys() < gradients(twin).keys()


def is_packed(parameter):
    return getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False)

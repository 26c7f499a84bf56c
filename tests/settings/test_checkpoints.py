"""Checkpoints of 8 and 4 bits, written byte by byte, are replayed as plain models of the values that they stand for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.settings.comparing import policy, require_replayed

BLOCK = 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""What the 16 values of four bits stand for."""


def fp8(weights):
    """DeepSeek's: float8 of [32, 32] blocks, each with a float32 scale."""
    quantized, plain = {}, {}
    for name, weight in weights.items():
        quantized[name] = plain[name] = weight.bfloat16()
        if not name.endswith("_proj.weight"):
            continue
        blocks = weight.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
        scales = blocks.abs().amax((-2, -1)) / 448
        spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        quantized[name] = (weight / spread).to(torch.float8_e4m3fn)
        quantized[f"{name}_scale_inv"] = scales
        plain[name] = (quantized[name].float() * spread).bfloat16()
    how = {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head", "gate"]}
    return quantized, plain, {"quant_method": "fp8", "activation_scheme": "dynamic", **how}


def mxfp4(weights):
    """gpt-oss's: 32 values of four bits in 16 bytes, the first in the low half, with an exponent of eight bits."""
    quantized, plain = {}, {}
    for name, weight in weights.items():
        plain[name] = weight.bfloat16()
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantized[name] = plain[name]
            continue
        groups = weight.mT.unflatten(-1, (-1, BLOCK))  # [E, out, in / 32, 32]
        exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
        codes = (groups / 2**exponents).unsqueeze(-1).sub(E2M1).abs().argmin(-1).to(torch.uint8)
        quantized[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        quantized[f"{name}_scales"] = (exponents[..., 0] + 127).to(torch.uint8)
        plain[name] = (E2M1[codes.long()] * 2**exponents).flatten(-2).mT.contiguous().bfloat16()
    return quantized, plain, {"quant_method": "mxfp4"}


@pytest.mark.shows("Hugging Face", "FP8 and MXFP4 checkpoints, dequantized on a CPU")
@pytest.mark.parametrize(
    ("family", "form", "packed"),
    [("qwen3_moe", fp8, torch.float8_e4m3fn), ("gpt_oss", mxfp4, torch.uint8)],
    ids=["fp8", "mxfp4"],
)
def test_dequantized_checkpoints(family, form, packed, tmp_path):
    folders = [tmp_path / "quantized", tmp_path / "plain"]
    for folder in folders:
        policy(family).save_pretrained(folder)
    weights = load_file(folders[0] / "model.safetensors")
    *both, how = form(weights)
    for folder, tensors in zip(folders, both, strict=True):
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folders[0] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": how}))
    assert packed in {tensor.dtype for tensor in both[0].values()}

    def make(folder):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, trust_remote_code=False, use_safetensors=True
        )

    models = [make(folder) for folder in folders]
    for (name, seen), expected in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(seen, expected), name
    require_replayed(lambda: make(folders[0]), lambda: make(folders[1]))

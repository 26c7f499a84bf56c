"""A Qwen3-MoE with one layer of multi-token prediction, which mbridge reads for other families alone."""

import json
import re
from pathlib import Path

import torch
from mbridge.core import register_model
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from safetensors.torch import load_file, save_file

from examples.verl.tiny_checkpoint import save_policy
from foreroute.testing import megatron_on_cpu

OWN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
"""Of a layer, by the names of Megatron and of DeepSeek's checkpoints."""


@register_model("qwen3_moe")
class PredictingBridge(Qwen3MoEBridge):
    """mbridge's own for Qwen3-MoE, with its way of DeepSeek-V3 for the layer of prediction."""

    def _build_base_config(self, **settings):
        return super()._build_base_config(**settings, mtp_num_layers=self.hf_config.num_nextn_predict_layers or None)

    def _get_gptmodel_args(self):
        found = super()._get_gptmodel_args()
        if self.config.mtp_num_layers:
            block = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False)
            megatron_on_cpu.use_norm(block, megatron_on_cpu.RMSNorm, of_heads=True)
            spec = found["mtp_block_spec"] = get_gpt_mtp_block_spec(self.config, block, use_transformer_engine=False)
            for layer in spec.layer_specs if spec else ():  # there is one on the last stage alone
                for norm in ("enorm", "hnorm", "layer_norm"):
                    setattr(layer.submodules, norm, megatron_on_cpu.RMSNorm)
        return found

    def _weight_name_mapping_mcore_to_hf(self, name):
        if not name.startswith("mtp."):
            return super()._weight_name_mapping_mcore_to_hf(name)
        number = self.config.num_layers
        if found := re.fullmatch(r"mtp\.layers\.0\.(\w+)\.weight", name):
            return [f"model.layers.{number}.{OWN[found[1]]}.weight"]
        name = name.replace("mtp.layers.0.transformer_layer", f"decoder.layers.{number}")
        return super()._weight_name_mapping_mcore_to_hf(
            name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        )


def save_predicting_policy(folder, *, layers):
    """Write the checkpoint of `save_policy` with a layer more, whose weights are those of the last one."""
    save_policy(folder, mlp_only_layers=[], num_hidden_layers=layers)
    path = Path(folder) / "model.safetensors"
    weights, last, mine = load_file(path), f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    weights |= {name.replace(last, mine): value.clone() for name, value in weights.items() if name.startswith(last)}
    size = weights["model.norm.weight"].numel()
    drawn = torch.Generator().manual_seed(1)
    weights |= {f"{mine}{OWN[norm]}.weight": torch.ones(size) for norm in ("enorm", "hnorm", "final_layernorm")}
    weights[f"{mine}eh_proj.weight"] = torch.randn(size, 2 * size, generator=drawn) * size**-0.5
    save_file(weights, path, {"format": "pt"})
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    return str(folder)

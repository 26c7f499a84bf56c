#!/usr/bin/env bash
# Guess, written down before: a LoRA adapter that was trained under transformers 4, where each expert was three Linear
# layers, is loaded whole under transformers 5, where the weights of all experts are one tensor; what cannot be loaded is
# named.
# Seen in PEFT 0.21.2 with transformers 5.24.0: of an adapter on gate_proj, up_proj and down_proj, DeepSeek-V3 and GLM-4.5
# get the part of the routed experts alone. The shared experts and the dense layers, which are Linear layers still, get
# nothing. In Qwen2-MoE the shared experts get theirs, and the routed ones nothing. No warning names a layer or a tensor
# of the file that was left out, and the merged weights lack them. `target_modules="all-linear"` leaves the same layers of
# DeepSeek-V3 and GLM-4.5 without LoRA when one is made anew.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$tmp/adapter.py" <<'PYTHON'
import json
import sys
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

folder, RANK, ALPHA, TARGETS = Path(sys.argv[1]), 4, 8, ("gate_proj", "up_proj", "down_proj")
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2)
sizes |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_experts_per_tok=2)
shared = dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)
heads = dict(q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
models = {
    "qwen3_moe": dict(num_experts=4),
    "deepseek_v3": shared | heads,
    "glm4_moe": shared,
    "qwen2_moe": dict(num_experts=4, shared_expert_intermediate_size=24),
}


def kind(name):
    if ".experts." in name:
        return "routed experts"
    return "shared experts" if ".shared_expert" in name else "dense layers"


def effects(model_type, own):
    """How much of the update that the adapter holds the merged weights have, by kind of layer, and what was warned of."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **own))
    before, wanted, file = {name: w.detach().clone() for name, w in model.named_parameters()}, {}, {}

    def lora(name, rows, columns):
        a, b = torch.randn(RANK, columns) * 0.1, torch.randn(rows, RANK) * 0.1
        file[f"base_model.model.{name}.lora_A.weight"], file[f"base_model.model.{name}.lora_B.weight"] = a, b
        return ALPHA / RANK * b @ a

    for name, weight in before.items():
        where, _, last = name.removesuffix(".weight").rpartition(".")
        if where.endswith(".experts"):
            parts, (rows, columns) = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,), weight.shape[1:]
            wanted[name] = torch.stack([
                torch.cat([lora(f"{where}.{expert}.{part}", rows // len(parts), columns) for part in parts])
                for expert in range(len(weight))
            ])
        elif last in TARGETS:
            wanted[name] = lora(f"{where}.{last}", *weight.shape)
    saved = folder / model_type
    saved.mkdir()
    save_file(file, saved / "adapter_model.safetensors")
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS))
    (saved / "adapter_config.json").write_text(json.dumps(config))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        merged = dict(peft.PeftModel.from_pretrained(model, saved).merge_and_unload().named_parameters())
    shares = {}
    for name, delta in wanted.items():
        shares.setdefault(kind(name), set()).add(round(float((merged[name] - before[name]).norm() / delta.norm()), 3))
    named = [str(each.message) for each in told if any(part in str(each.message) for part in (".mlp.", "shared_expert", "lora_A"))]
    return shares, named


def left_out(model_type, own):
    """Kinds of Linear layers on which `all-linear` puts no LoRA."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **own))
    linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    return {kind(n) for n in linear if isinstance(model.get_submodule(n), torch.nn.Linear)}


seen = {each: (*effects(each, own), left_out(each, own)) for each, own in models.items()}
print(f"PEFT {peft.__version__}, transformers {transformers.__version__}; share of the adapter's update in the merged weights,")
print("warnings that name what is left out, Linear layers without LoRA under all-linear:")
for each, found in seen.items():
    print(f"{each}:", *found)
alone = {"dense layers": {0.0}, "shared experts": {0.0}, "routed experts": {1.0}}, [], {"dense layers", "shared experts"}
sys.exit(seen != {
    "qwen3_moe": ({"routed experts": {1.0}}, [], set()),
    "deepseek_v3": alone,
    "glm4_moe": alone,
    "qwen2_moe": ({"shared experts": {1.0}, "routed experts": {0.0}}, [], set()),
})
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/adapter.py" "$tmp" || { echo "it behaves otherwise now" >&2; exit 1; }

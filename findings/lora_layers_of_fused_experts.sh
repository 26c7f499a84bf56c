#!/usr/bin/env bash
# Guess, written down before: `layers_to_transform=[1]` of a LoRA configuration, or `exclude_modules` that match all in the
# other layers, leaves those layers without LoRA, their experts too; or else a warning says that experts are not bounded.
# Seen in PEFT 0.21.2 with transformers 5.24.0: attention has LoRA in layer 1 alone, experts whose weights are one tensor
# have it in every layer. It is so where they are named by `target_parameters`, and in Qwen3-MoE, Mixtral and OLMoE where
# they are named by their projections (gate_proj, up_proj, down_proj; w1, w2, w3 of Mixtral) in `target_modules`, which
# PEFT takes as those tensors. One step trains and `merge_and_unload` changes experts of layers that were to stay as they
# are. No warning names them or either option.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$tmp/layers.py" <<'PYTHON'
import warnings

import peft
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=4, head_dim=16, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
KINDS = {
    "qwen3_moe": (dict(num_experts=4, moe_intermediate_size=32), ["gate_proj", "up_proj", "down_proj"]),
    "olmoe": (dict(num_experts=4), ["gate_proj", "up_proj", "down_proj"]),
    "mixtral": (dict(num_local_experts=4), ["w1", "w2", "w3"]),
    "gpt_oss": (dict(num_local_experts=4), None),
}
BOUNDS = dict(layers_to_transform=[1]), dict(exclude_modules=r".*\.layers\.[02]\..*")
IDS = torch.randint(3, 64, (4, 32), generator=torch.Generator().manual_seed(0))


def changed(kind, sizes, targets):
    """The layers whose attention and whose experts have other weights after a step of LoRA and a merge."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **sizes))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **targets))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()
    after = dict(model.merge_and_unload().named_parameters())
    assert after.keys() == before.keys()
    names = [name for name in before if not torch.equal(before[name], after[name])]
    return {part: sorted({int(n.split(".")[2]) for n in names if f".{part}." in n}) for part in ("self_attn", "experts")}


print(f"PEFT {peft.__version__}, transformers {transformers.__version__}")
for kind, (sizes, projections) in KINDS.items():
    tensors = ["experts.gate_up_proj", "experts.down_proj"]
    ways = {"target_parameters": dict(target_modules=["q_proj"], target_parameters=tensors)}
    if projections:
        ways["target_modules"] = dict(target_modules=["q_proj", *projections])
    for way, targets in ways.items():
        for bound in BOUNDS:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                seen = changed(kind, sizes, targets | bound)
            print(f"{kind}, experts by {way}, {next(iter(bound))}: changed layers {seen}")
            assert seen == {"self_attn": [1], "experts": [0, 1, 2]}
            words = "layers_to_transform", "exclude", "layers.0", "layers.2", "every layer", "all layers"
            assert not [each for each in told if any(word in str(each.message) for word in words)]
print("neither option bounds the LoRA of fused experts, and nothing says so")
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/layers.py"

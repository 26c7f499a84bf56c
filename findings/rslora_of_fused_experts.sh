#!/usr/bin/env bash
# Guess, written down before: LoRA with `use_rslora` has the scale alpha / sqrt(r) in every layer, in experts whose gate
# and up projections are one tensor too.
# Seen in PEFT 0.21.2 with transformers 5.24.0: where PEFT reads gate_proj and up_proj as that one tensor, it doubles r and
# alpha, so that alpha / r stays. alpha / sqrt(r) does not: gate and up projections are updated by sqrt(2) times what was
# asked, down projections and attention by what was asked. Two warnings, which come without rsLoRA too, say that the
# patterns of the doubled rank and alpha matched nothing, although they matched.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$tmp/scales.py" <<'PYTHON'
import sys
import warnings

import peft
import transformers
from transformers import OlmoeConfig, OlmoeForCausalLM

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4)
sizes |= dict(num_experts=4, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
targets, RANK, ALPHA = ["q_proj", "gate_proj", "up_proj", "down_proj"], 4, 8
seen = {}
for rslora in (False, True):
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, use_rslora=rslora)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = peft.get_peft_model(OlmoeForCausalLM(OlmoeConfig(**sizes)), config)
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    asked = ALPHA / (RANK**0.5 if rslora else RANK)
    times = {getattr(m, "parameter_name", "attention"): round(m.scaling["default"] / asked, 3) for m in layers}
    seen[rslora] = times, any("rank_pattern keys did not match" in str(each.message) for each in told)
print(f"PEFT {peft.__version__}, transformers {transformers.__version__}")
print("scale as a multiple of what was asked, and whether the pattern of the rank is called unmatched:")
print("alpha / r:", *seen[False])
print("alpha / sqrt(r), use_rslora:", *seen[True])
right = {"attention": 1.0, "down_proj": 1.0, "gate_up_proj": 1.0}
sys.exit(seen != {False: (right, True), True: ({**right, "gate_up_proj": 1.414}, True)})
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/scales.py" || { echo "it behaves otherwise now" >&2; exit 1; }

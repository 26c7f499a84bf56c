#!/usr/bin/env bash
# Guess, written down as a test before: a model that trains under reentrant activation checkpoints in one minor release
# of transformers does so in the next; at most the names of arguments change.
# Seen: in 5.24.0 the rotary embedding of MistralLarge4 has a trainable parameter, `alpha`, a buffer before, and runs with
# gradients. All layers share what it returns, which has a graph outside of their checkpoints. The backward of the first
# layer frees it, and that of the second raises. Without checkpoints, or with non-reentrant ones, the model trains.
# 5.23.0 trains under both kinds.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
pip() { "$tmp/venv/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0
cat > "$tmp/train.py" <<'PYTHON'
import sys
import warnings

import torch
import transformers
from transformers.models.mistral_large4 import MistralLarge4TextConfig, MistralLarge4TextModel

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
config = MistralLarge4TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
    first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, pad_token_id=0,
)
outcomes = {}
for name, use_reentrant in (("none", None), ("non-reentrant", False), ("reentrant", True)):
    torch.manual_seed(0)
    model = MistralLarge4TextModel(config).train()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    try:
        model(input_ids=torch.arange(8)[None], use_cache=False)[0].square().mean().backward()
        outcomes[name] = "trains"
    except RuntimeError as error:
        outcomes[name] = " ".join(str(error).split()[:9])
trained = [name for name, _ in model.named_parameters() if "rotary" in name]
print(f"transformers {transformers.__version__}, torch {torch.__version__}: {outcomes}; trainable: {trained}")
raised = outcomes["reentrant"].startswith("Trying to backward through the graph a second time")
others = outcomes["none"] == outcomes["non-reentrant"] == "trains"
wanted = sys.argv[1] == "raises"
sys.exit(not (others and raised == wanted and bool(trained) == wanted))
PYTHON
pip transformers==5.23.0
"$tmp/venv/bin/python" "$tmp/train.py" trains || { echo "5.23.0 behaves otherwise now" >&2; exit 1; }
pip transformers==5.24.0
"$tmp/venv/bin/python" "$tmp/train.py" raises || { echo "5.24.0 behaves otherwise now" >&2; exit 1; }

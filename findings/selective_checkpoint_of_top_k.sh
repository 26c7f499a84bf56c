#!/usr/bin/env bash
# Guess, written down as a test before: a selective activation checkpoint may keep the results of any operator. Keeping
# those of top-k is how a recomputation of an MoE model is made to run the experts of its forward.
# Seen: with Qwen3-MoE as it is released (`norm_topk_prob`) the backward raises "Tensor cached during selective
# activation checkpoint has been mutated": the router divides the values of top-k in place, by `/=`. Without the division
# the model trains, and so it does when the results of products are kept, but for top-k's.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
pip() { "$tmp/venv/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0
pip transformers==5.24.0
cat > "$tmp/train.py" <<'PYTHON'
import sys
import warnings
from functools import partial

import torch
import transformers
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

warnings.simplefilter("ignore")
aten = torch.ops.aten


def outcome(kept, normed):
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=normed,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).train()
    context_fn = partial(create_selective_checkpoint_contexts, [kept])
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context_fn})
    tokens = torch.arange(1, 9)[None]
    try:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    except RuntimeError as error:
        return str(error)
    return "trains"


seen = {
    "top-k kept, normed": outcome(aten.topk.default, True),
    "top-k kept, not normed": outcome(aten.topk.default, False),
    "products kept, normed": outcome(aten.mm.default, True),
}
print(f"transformers {transformers.__version__}, torch {torch.__version__}: {seen}")
raised, *others = seen.values()
sys.exit(not ("has been mutated" in raised and others == ["trains"] * 2))
PYTHON
"$tmp/venv/bin/python" "$tmp/train.py" || { echo "it behaves otherwise now" >&2; exit 1; }

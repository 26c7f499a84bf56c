#!/usr/bin/env bash
# Guess, written down before: a step of AdamW leaves an expert to which no token of its batch was routed where it was, as it
# has no gradient. So it is in transformers 4, where each expert has weights of its own.
# Seen in transformers 5.24.0: where the weights of all experts are one tensor, an idle expert has a gradient of zeros, not
# none. The moments of earlier steps move it on, nine tenths as far as the experts that were used; weight decay would shrink
# it too. In 4.57.6 all idle experts of Qwen3-MoE, Mixtral, DeepSeek-V3 and GLM-4.5 keep every bit, from the same seed, by
# the same optimizer. So the same training has other steps in the two, the more so the fewer tokens a batch has for each
# expert. Those of OLMoE, which runs experts on no tokens there, and gpt-oss are moved in both. Nothing is said.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
pip() { "$tmp/venv/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0
cat > "$tmp/idle.py" <<'PYTHON'
import re
import sys

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS = 8
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=4, head_dim=8, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPS = dict(n_routed_experts=EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=0, n_shared_experts=1)
HEADS = dict(q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
KINDS = {
    "qwen3_moe": dict(num_experts=EXPERTS, moe_intermediate_size=16),
    "mixtral": dict(num_local_experts=EXPERTS),
    "olmoe": dict(num_experts=EXPERTS),
    "deepseek_v3": dict(**GROUPS, **HEADS, moe_intermediate_size=16),
    "glm4_moe": dict(**GROUPS, moe_intermediate_size=16),
    "gpt_oss": dict(num_local_experts=EXPERTS),
}
IDS = torch.randint(3, 64, (8, 32), generator=torch.Generator().manual_seed(0))


def down_projections(model):
    """The down projection of each expert and its gradient, whether it is a Linear layer's or a part of one tensor."""
    for name, weight in model.named_parameters():
        if name.endswith(".experts.down_proj"):
            for expert in range(EXPERTS):
                yield weight.detach()[expert], None if weight.grad is None else weight.grad[expert]
        elif re.search(r"\.experts\.\d+\.(down_proj|w2)\.weight$", name):
            yield weight.detach(), weight.grad


def moved(kind):
    """How far, by mean, the idle and the used experts of a second step are moved by it, and how many of them move."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for ids in (IDS, IDS[:1, :2]):
        optimizer.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()  # all tokens count, the last of a row too
        before = [(weight.clone(), grad is None or not grad.any()) for weight, grad in down_projections(model)]
        optimizer.step()
        if ids is IDS:
            assert not any(idle for _, idle in before), "the first batch has tokens for every expert"
    far = {True: [], False: []}
    for (old, idle), (new, _) in zip(before, down_projections(model), strict=True):
        far[idle].append((new - old).norm().item())
    assert len(before) == 2 * EXPERTS and far[True] and far[False]
    return [(sum(each) / len(each), sum(one > 0 for one in each), len(each)) for each in (far[True], far[False])]


print(f"transformers {transformers.__version__}, torch {torch.__version__}")
whole = transformers.__version__.startswith("5.")
for kind in KINDS:
    (idle, moving, of), (used, *_) = moved(kind)
    print(f"{kind}: {moving} of {of} idle experts are moved, by {idle:.4f}; used ones by {used:.4f}")
    if whole or kind in ("olmoe", "gpt_oss"):
        assert moving == of and idle > 0.8 * used
    else:
        assert moving == 0 and used > 0.01
PYTHON
export OMP_NUM_THREADS=1
for version in 4.57.6 5.24.0; do
    pip "transformers==$version"
    "$tmp/venv/bin/python" "$tmp/idle.py" 2> "$tmp/errors" || { tail -n 5 "$tmp/errors" >&2; exit 1; }
done
echo "experts without tokens are moved in transformers 5; in transformers 4 those of four families stay"

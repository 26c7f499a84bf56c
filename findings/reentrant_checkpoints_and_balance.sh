#!/usr/bin/env bash
# Guess, written down before: activation checkpoints of either kind leave gradients as they are, those of the
# load-balancing loss of a Mixture-of-Experts model (`output_router_logits`, `router_aux_loss_coef`) among them.
# Seen in transformers 5.24.0: under reentrant checkpoints the loss has its balancing term, the same number as without
# checkpoints, and that term has no gradient. Router logits are kept as layers return them; reentrant checkpoints run
# layers without gradients first, and their second run is not kept. So routers learn nothing of balance, and nothing is
# said: the cross-entropy beside it has gradients. Under non-reentrant checkpoints all gradients are those without.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$tmp/measure.py" <<'PYTHON'
import sys
import warnings

import torch
import transformers
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
CONFIGS = {
    "Qwen3-MoE": Qwen3MoeConfig(**SIZES, head_dim=8, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2),
    "Mixtral": MixtralConfig(**SIZES, intermediate_size=16, num_local_experts=8, num_experts_per_tok=2),
    "OLMoE": OlmoeConfig(**SIZES, intermediate_size=16, num_experts=8, num_experts_per_tok=2),
}
IDS = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def measure(config, coefficient, use_reentrant):
    """The loss, and the gradients of all parameters, under a coefficient of the balancing term."""
    config.output_router_logits, config.router_aux_loss_coef = True, coefficient
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item(), torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


as_seen = True
for name, config in CONFIGS.items():
    added, gradients = {}, {}
    for kind, use_reentrant in (("none", None), ("non-reentrant", False), ("reentrant", True)):
        (with_term, gradient), (without, plain) = (measure(config, value, use_reentrant) for value in (10.0, 0.0))
        added[kind], gradients[kind] = with_term - without, (gradient - plain).norm().item()
        as_seen &= plain.norm().item() > 0.1
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, {name}: the term adds {added} to the loss, "
        f"and gradients of norm {gradients}"
    )
    as_seen &= max(added.values()) - min(added.values()) < 1e-3 and min(added.values()) > 10
    as_seen &= gradients["reentrant"] == 0 and gradients["none"] > 0.1
    as_seen &= abs(gradients["non-reentrant"] / gradients["none"] - 1) < 1e-3
sys.exit(not as_seen)
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/measure.py" || { echo "it behaves otherwise now" >&2; exit 1; }

#!/usr/bin/env bash
# Guess, as gradient accumulation is documented: N micro-batches are one step on all of them. Where all N are the same,
# the gradient of a step is that of one of them, of the cross-entropy and of the load-balancing loss of a
# Mixture-of-Experts model (`output_router_logits`, `router_aux_loss_coef`) alike.
# Seen in transformers 5.24.0: that of the auxiliary loss is N times as large, 4, 8 and 16 times at 4, 8 and 16 steps; that
# of the cross-entropy is as guessed. A model that takes `num_items_in_batch` divides its cross-entropy by the tokens of
# the whole step and adds the auxiliary loss of the micro-batch; Trainer then divides neither by the steps. So the
# coefficient of a configuration is multiplied by `gradient_accumulation_steps`.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cat > "$tmp/measure.py" <<'PYTHON'
import sys
import tempfile

import accelerate
import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

SIZES = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
TOKENS = torch.randint(1, 50, (12,), generator=torch.Generator().manual_seed(0))


def step(coefficient, steps):
    """What one step of SGD at rate 1 takes from the routers, over `steps` micro-batches of one and the same sequence."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, initializer_range=0.3, output_router_logits=True, router_aux_loss_coef=coefficient)
    model = Qwen3MoeForCausalLM(config)
    before = [layer.mlp.gate.weight.detach().clone() for layer in model.model.layers]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=1, gradient_accumulation_steps=steps, max_steps=1, learning_rate=1.0,
            optim="sgd", lr_scheduler_type="constant", max_grad_norm=1e9, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )
        data = [{"input_ids": TOKENS, "labels": TOKENS} for _ in range(steps)]
        Trainer(model, arguments, train_dataset=data).train()
    return torch.cat([old - layer.mlp.gate.weight.detach() for old, layer in zip(before, model.model.layers)]).double()


def gradients(steps):
    entropy = step(0.0, steps)
    return entropy, step(1.0, steps) - entropy


once = gradients(1)
ratios = {}
for steps in (4, 8, 16):
    ratios[steps] = [(now.norm() / before.norm()).item() for now, before in zip(gradients(steps), once)]
print("transformers", transformers.__version__, "torch", torch.__version__, "accelerate", accelerate.__version__)
for steps, (entropy, auxiliary) in ratios.items():
    print(f"{steps} steps: gradient of the cross-entropy x {entropy:.3f}, of the auxiliary loss x {auxiliary:.3f}")
seen = all(abs(e - 1) < 1e-2 and abs(a / steps - 1) < 1e-2 for steps, (e, a) in ratios.items())
print("behaviour: the auxiliary loss is multiplied by the steps" if seen else "behaviour: changed")
sys.exit(0 if seen else 1)
PYTHON
"$tmp/venv/bin/python" "$tmp/measure.py"

#!/usr/bin/env bash
# Guess, written down before: `label_smoothing_factor` smooths the targets of the cross-entropy and nothing else. The
# load-balancing loss of a Mixture-of-Experts model stays in the loss and in the gradients of its routers, with Trainer
# (`output_router_logits`, `router_aux_loss_coef`) and with SFTTrainer (`router_aux_loss_coef`) alike.
# Seen in transformers 5.24.0 and TRL 1.16.0: with any smoothing, 0.000001 as well as 0.1, it is gone. Both take the loss
# from the logits then, and the model's own loss, which has the balancing term, is not used. Loss and step are, number by
# number, those at coefficient 0, although the coefficient is 1, and the evaluation loss of Trainer lacks the term too.
# SFTTrainer goes on logging an `aux_loss` as if it were trained; it warns that smoothing is deprecated and slow there. No
# warning of either names the balancing loss, and nothing is raised.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 trl==1.16.0
cat > "$tmp/measure.py" <<'PYTHON'
import logging
import sys
import tempfile
import warnings

import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

SIZES = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=1)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
TOKENS = torch.randint(2, 50, (12,), generator=torch.Generator().manual_seed(0)).tolist()
WORDS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0")), pad_token="w0", eos_token="w1", unk_token="w0"
)
messages = []
disable_progress_bars()


class Keep(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


for name in ("transformers", "trl"):
    logging.getLogger(name).addHandler(Keep())


def step(library, coefficient, smoothing):
    """What one step of SGD at rate 1 takes from the routers, and what is logged of it."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, initializer_range=0.3, output_router_logits=True, router_aux_loss_coef=coefficient)
    model = Qwen3MoeForCausalLM(config)
    before = [layer.mlp.gate.weight.detach().clone() for layer in model.model.layers]
    with tempfile.TemporaryDirectory() as folder:
        options = dict(
            output_dir=folder, per_device_train_batch_size=1, max_steps=1, learning_rate=1.0, optim="sgd", lr_scheduler_type="constant",
            max_grad_norm=1e9, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
            label_smoothing_factor=smoothing, gradient_checkpointing=False, bf16=False, per_device_eval_batch_size=1,
        )
        data = Dataset.from_list([{"input_ids": TOKENS, "labels": TOKENS}])
        if library == "transformers":
            trainer = Trainer(model, TrainingArguments(**options), train_dataset=data, eval_dataset=data)
        else:
            arguments = SFTConfig(**options, router_aux_loss_coef=coefficient)
            trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=WORDS)
        trainer.remove_callback(PrinterCallback)
        evaluated = trainer.evaluate()["eval_loss"] if library == "transformers" else None
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    moved = [old - layer.mlp.gate.weight.detach() for old, layer in zip(before, model.model.layers)]
    return torch.cat(moved).double(), logged["loss"], logged.get("aux_loss"), evaluated


rows = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for library in ("transformers", "trl"):
        for smoothing in (0.0, 1e-6, 0.1):
            rows.append((library, smoothing, step(library, 0.0, smoothing), step(library, 1.0, smoothing)))
print("transformers", transformers.__version__, "torch", torch.__version__, "trl", trl.__version__)
seen = True
for library, smoothing, without, balanced in rows:
    own = (balanced[0] - without[0]).norm().item()
    line = f"{library}, smoothing {smoothing}: step of routers {without[0].norm():.4f}, of it by the balancing loss {own:.4f}"
    line += f", loss {without[1]:.4f} at coefficient 0 and {balanced[1]:.4f} at 1, aux_loss logged {balanced[2]}"
    print(line + (f", evaluation {without[3]:.4f} and {balanced[3]:.4f}" if without[3] else ""))
    if smoothing:
        seen &= own == 0 and without[1] == balanced[1] and without[3] == balanced[3]
    else:
        seen &= own > 0.1 and balanced[1] > without[1] + 1 and (without[3] is None or balanced[3] > without[3] + 1)
    seen &= without[0].norm().item() > 0.1
    seen &= library == "transformers" or balanced[2] > 1
told = [text for text in messages + [str(w.message) for w in caught] if any(word in text.lower() for word in ("aux", "router", "balanc", "expert"))]
print("warnings of the balancing loss:", len(told), told)
seen &= not told
print("behaviour: label smoothing drops the balancing loss" if seen else "behaviour: changed")
sys.exit(0 if seen else 1)
PYTHON
"$tmp/venv/bin/python" "$tmp/measure.py"

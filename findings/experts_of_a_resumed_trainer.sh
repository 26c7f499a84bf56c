#!/usr/bin/env bash
# Guess, written down before: a run of Trainer that is resumed from its checkpoint takes the steps of one that was not
# interrupted, in Mixture-of-Experts models too, and `load_best_model_at_end` leaves the weights of the best checkpoint.
# Seen in transformers 5.24.0: so it is for a dense Qwen3 and for gpt-oss. Checkpoints of Qwen3-MoE, OLMoE, DeepSeek-V3,
# GLM-4.5 and Mixtral have each expert's projections by themselves, while the model has one tensor of all experts.
# `from_pretrained` joins them, Trainer does not: it loads the rest and goes on. A resumed run has the experts that its model
# was made with, of Mixtral the routers too, beside trained attention and the optimizer's state of the trained experts. The
# best model is its checkpoint with the experts of the last step. The log warns of missing and unexpected keys; nothing
# is raised. What `from_pretrained` reads from the same checkpoint is right.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cat > "$tmp/resume.py" <<'PYTHON'
import logging
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

transformers.utils.logging.disable_progress_bar()
told = []
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
logging.getLogger("transformers.trainer").addHandler(handler)
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=4, head_dim=8, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPS = dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=0, n_shared_experts=1)
HEADS = dict(q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
KINDS = {
    "qwen3": {},
    "gpt_oss": dict(num_local_experts=4),
    "qwen3_moe": dict(num_experts=4, moe_intermediate_size=16),
    "olmoe": dict(num_experts=4),
    "deepseek_v3": dict(**GROUPS, **HEADS, moe_intermediate_size=16),
    "glm4_moe": dict(**GROUPS, moe_intermediate_size=16),
    "mixtral": dict(num_local_experts=4),
}
ROWS = torch.randint(3, 64, (16, 16), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


def make(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind]))


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def read(folder):
    return weights(AutoModelForCausalLM.from_pretrained(folder))


def unlike(some, others):
    """The names of the weights which differ, without those of modules and layers before them."""
    return {".".join(name.split(".")[-2:]) for name in some if not torch.equal(some[name], others[name])}


class Start(TrainerCallback):
    def on_step_begin(self, args, state, control, model, **kwargs):
        self.weights = getattr(self, "weights", None) or weights(model)


def trained(kind, folder, resume=None, **more):
    """A model after four steps, its Trainer, and the weights before the first step that it took."""
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, learning_rate=1e-2, lr_scheduler_type="constant", max_steps=4,
        save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, optim="adamw_torch", logging_strategy="no", **more,
    )
    model, start = make(kind), Start()
    trainer = Trainer(model, arguments, train_dataset=DATA, eval_dataset=DATA, callbacks=[start])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return weights(model), trainer, start.weights


print("transformers", transformers.__version__)
EXPERTS = {"experts.gate_up_proj", "experts.down_proj"}
for kind in KINDS:
    folder = Path(sys.argv[1]) / kind
    told.clear()
    whole, *_ = trained(kind, folder)
    middle = folder / "checkpoint-2"
    assert not unlike(read(folder / "checkpoint-4"), whole), "from_pretrained reads what was saved"
    resumed, _, start = trained(kind, folder, str(middle))
    # The higher loss is called the better one here, so that the best checkpoint is not the last.
    best = dict(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, greater_is_better=True)
    kept, trainer, _ = trained(kind, folder / "best", metric_for_best_model="eval_loss", **best)
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    lost = unlike(start, read(middle))
    print(f"{kind}: resumed, not loaded: {sorted(lost)}; ends elsewhere: {bool(unlike(resumed, whole))}")
    not_best = unlike(kept, read(trainer.state.best_model_checkpoint))
    print(f"{kind}: best model, not loaded: {sorted(not_best)}")
    warned = sum("missing keys" in each for each in told)
    expected = set() if kind in ("qwen3", "gpt_oss") else EXPERTS | ({"gate.weight"} if kind == "mixtral" else set())
    assert lost == not_best == expected and bool(unlike(resumed, whole)) == bool(expected)
    assert warned == (2 if expected else 0), "the log names the missing keys, once for each of the two"
    made, last = weights(make(kind)), read(folder / "best" / "checkpoint-4")
    for name in start:
        if ".".join(name.split(".")[-2:]) in lost:
            assert torch.equal(start[name], made[name]) and torch.equal(kept[name], last[name])
print("Trainer leaves the experts of a resumed run as they were made, and those of its best model as they were last")
PYTHON
export OMP_NUM_THREADS=1
"$tmp/venv/bin/python" "$tmp/resume.py" "$tmp/runs" 2> "$tmp/errors" || { tail -n 5 "$tmp/errors" >&2; exit 1; }

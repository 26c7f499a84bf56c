"""GRPO with TRL on a tiny MoE model, sampled from a bfloat16 copy, with R3. Without either: grpo.py."""

import sys

from datasets import Dataset
from trl import GRPOConfig

from foreroute.trainers.trl import EmbeddedEngine, GRPOTrainer, rollout_with
from tiny import policy, tokenizer, vowels

model = policy()
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer(),
    reward_funcs=vowels,
    rollout_func=rollout_with(EmbeddedEngine(model, "bfloat16")),
    train_dataset=Dataset.from_dict({"prompt": [f"{'very ' * (i % 3)}many vowels {i}: " for i in range(64)]}),
    args=GRPOConfig(
        output_dir=sys.argv[1],
        max_steps=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=4,
        num_iterations=2,
        max_completion_length=24,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    ),
)
trainer.train()

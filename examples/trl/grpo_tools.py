"""GRPO with TRL on conversations with a tool, on a tiny MoE model, with R3. TRL calls the tool."""

import sys

from datasets import Dataset
from trl import GRPOConfig

from foreroute.trainers.trl import EmbeddedEngine, GRPOTrainer, rollout_with
from tiny import agent, answers, chat_tokenizer, look_up

model = agent()
questions = [[{"role": "user", "content": f"{'very ' * (i % 3)}many {i}"}] for i in range(64)]
trainer = GRPOTrainer(
    model=model,
    processing_class=chat_tokenizer(),
    reward_funcs=answers,
    tools=[look_up],
    rollout_func=rollout_with(EmbeddedEngine(model, "bfloat16")),
    train_dataset=Dataset.from_dict({"prompt": questions}),
    args=GRPOConfig(
        output_dir=sys.argv[1],
        max_steps=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=4,
        num_iterations=2,
        max_completion_length=100,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    ),
)
trainer.train()

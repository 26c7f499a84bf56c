"""TRL runs of a few seconds. No pytest is needed."""

import os

import torch
from datasets import Dataset
from transformers import Qwen3MoeForCausalLM
from trl import GRPOConfig

from examples.trl.tiny import policy, tokenizer, vowels
from foreroute.trainers.trl import GRPOTrainer
from tests.roundings import terms_of

PROMPTS = [f"{'very ' * (i % 3)}many vowels {i}: " for i in range(32)]
"""They have several lengths, so that batches are padded on the left."""

SETTINGS = {
    # 8 sequences for each rollout, in 4 micro-batches, 2 of them to a step, each of them used twice
    "per_device_train_batch_size": 2,
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "num_generations": 2,
    "max_completion_length": 10,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}

NO_AUXILIARY = {"router_aux_loss_coef": 0.0} if hasattr(GRPOConfig, "router_aux_loss_coef") else {}
"""Without the routers' auxiliary loss, which TRL 1.6 never adds."""

TERMS = terms_of(128, vocabulary=258)
"""What the policy adds up: its four heads of 32 are its widest rows."""


def as_torchrun_does(rank):
    """Tell accelerate which of two processes this is."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ |= {name: str(value) for name, value in environment.items()}


def make(folder, *, cls=GRPOTrainer, model=None, prompts=PROMPTS, columns=(), **settings):
    """A trainer of this class on these prompts, with more columns; settings are its own and of its configuration."""
    given = Dataset.from_dict({"prompt": prompts, **dict(columns)})
    own = {name: settings.pop(name) for name in [*settings] if name not in GRPOConfig.__dataclass_fields__}
    return cls(
        model=model or policy(),
        train_dataset=given,
        eval_dataset=given.select(range(4)),
        args=GRPOConfig(folder, **SETTINGS | settings),
        **{"processing_class": tokenizer(), "reward_funcs": vowels, **own},
    )


def trained(*args, **settings):
    """A trainer is made, which seeds the random numbers, and trained."""
    trainer = make(*args, **settings)
    trainer.train()
    return trainer


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def saved_policy(folder, **kwargs):
    """A policy that can be loaded again, as TRL does for its reference model."""
    policy(**kwargs).save_pretrained(folder)
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)

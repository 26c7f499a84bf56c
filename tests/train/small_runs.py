"""A run that takes a second."""

import json

import numpy as np
import torch

from foreroute.train import parse_config
from foreroute.train.engines import make_engine
from foreroute.train.loop import make_trainer
from foreroute.train.model import make_policy
from foreroute.train.rollout import Scores
from foreroute.train.tasks import make_task
from foreroute.train.whole import Whole

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}


def small_values(**sections):
    values = {
        "name": "small",
        "model": {"sizes": dict(SIZES)},
        "task": {"min_operands": 2, "max_operands": 4},
        "warm_start": {"max_steps": 8, "batch_size": 16, "stop_at_loss": 0.01},
        "rollout": {"prompts": 6, "group_size": 4},
        "rl": {"steps": 5, "micro_step_tokens": 64, "warmup_steps": 2},
        "checkpoint": {"every": 2},
        "measure": {"save_trace_every": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return values


def small_config(**sections):
    return parse_config(small_values(**sections), source="test")


def records(folder):
    """Metrics without the times, which no two runs share."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def trainer_of(config):
    """A trainer at its initial weights, with the embedded engine."""
    task = make_task(config)
    policy = make_policy(config, task)
    return make_trainer(config, task, policy, Whole(policy), make_engine(config, policy))


def always_informative(task, problems, generation, group_size):
    """Rewards that differ within every group, for `rollout.score`: a model this small is always wrong."""
    return Scores(np.arange(len(generation)) % group_size / group_size)


def same_state(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return a == b

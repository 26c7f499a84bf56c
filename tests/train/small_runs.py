"""A run that takes a second."""

import json

import numpy as np
import torch

from foreroute.train import parse_config
from foreroute.train.loop import make_trainer
from foreroute.train.policy import CPU, make_engine, make_policy
from foreroute.train.prompts import make_task

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


def same_state(a, b):
    """Whether states of trainers, such as checkpoints hold, are the same to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return bool(a == b)


def small_values(**sections):
    values = {
        "name": "small",
        "device": "cpu",
        "model": {"sizes": dict(SIZES)},
        "task": {"min_operands": 2, "max_operands": 4},
        "warm_start": {"max_steps": 8, "batch_size": 16, "stop_at_loss": 0.01},
        "rollout": {"prompts": 6, "group_size": 4},
        "rl": {"steps": 5, "micro_step_tokens": 64, "warmup_steps": 2},
        "checkpoint": {"every": 2, "keep": 99},
        "measure": {"save_trace_every": 2},
    }
    return merged(values, sections)


def merged(values, sections):
    """Put keys of sections into those that are there."""
    return values | {
        name: {**values.get(name, {}), **section} if isinstance(section, dict) else section
        for name, section in sections.items()
    }


def small_config(**sections):
    return parse_config(small_values(**sections), source="test")


def records(folder):
    """Metrics without the times, which no two runs share."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def tensors_of(state):
    """All tensors in a state, in an order of their places."""
    if isinstance(state, torch.Tensor):
        return [state]
    parts = [state[key] for key in sorted(state, key=str)] if isinstance(state, dict) else state
    return [each for part in parts for each in tensors_of(part)] if isinstance(parts, list | tuple) else []


def trainer_of(config, device=CPU, begin=lambda model, task: None):
    """A trainer at its initial weights, or those that `begin` leaves, with the embedded engine."""
    task = make_task(config)
    policy = make_policy(config, task, device)
    begin(policy.model, task)
    return make_trainer(config, task, policy, make_engine(config, policy))


def random_rewards():
    """Rewards for `ChainTask.rewards` that differ in every group, and from call to call."""
    rng = np.random.default_rng(0)
    return lambda task, problems, responses: rng.random(len(responses))

"""The models that RL starts from, and what all runs of one have in common."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreroute.train import TrainConfig

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}

STARTS: dict[str, dict[str, Any]] = {
    "moe": {},
    # one expert with gate 1, as wide as two of the others: a dense model, which the trainer can record and replay
    "dense": {
        "model": {"sizes": {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 64}},
        "warm_start": {"aux_loss": 0.0},
    },
    "long": {"task": {"min_operands": 12, "max_operands": 12}},
    # a base model in the place of a supervised one: it has learned the form of answers, and few of them
    "weak": {"warm_start": {"stop_at_loss": 1.0}},
    # for vLLM, whose attention has no smaller heads on the CPU, and whose prefix cache holds no shorter prompts
    "served": {
        "model": {"sizes": {"head_dim": 32}},
        "task": {"min_operands": 17, "max_operands": 17},
        "warm_start": {"max_steps": 100, "stop_at_loss": 1.0},
    },
    # of part H, which has a task of its own: enough experts to specialise, and an engine of the trainer's precision
    "routes": {
        "model": {
            "sizes": {
                "num_hidden_layers": 8,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 32,
                "max_position_embeddings": 256,
            }
        },
        "warm_start": {"max_steps": 600, "batch_size": 16, "stop_at_loss": 0.01},
        "rollout": {"precision": "float32", "prompts": 64, "group_size": 4},
        "rl": {"steps": 6, "mini_steps": 2, "warmup_steps": 0},
    },
}
"""What each of them has instead of the values in `base_values`."""


def base_values(start: str) -> dict[str, Any]:
    """The configuration that all cells of a start share."""
    values: dict[str, Any] = {
        "name": "evidence",
        "model": {"family": "qwen3_moe", "sizes": dict(SIZES)},
        "warm_start": {"stop_at_loss": 0.3},
        "rollout": {"precision": "fp8", "prompts": 16, "group_size": 8},
        "rl": {"steps": 40, "clip_high": 0.27, "learning_rate": 4e-4, "micro_step_tokens": 8192},
        "measure": {"compare_every": 10, "save_trace_every": 1000},
        "checkpoint": {"every": 1000},
    }
    return merged(values, STARTS[start])


def configuration(base: dict[str, Any], settings: dict[str, Any], seed: int) -> TrainConfig:
    """Join a configuration of its parts."""
    from foreroute.train import parse_config  # loads torch, which those do without who only look at results

    return parse_config(merged(base, settings) | {"seed": seed}, source="the grid")


def start_path(folder: Path, start: str, seed: int) -> Path:
    """Name the file of a start's checkpoint."""
    return folder / f"{start}-{seed}.safetensors"


def merged(values: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A copy in which what `other` says wins, section by section."""
    result = deepcopy(values)
    for key, value in other.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else deepcopy(value)
    return result

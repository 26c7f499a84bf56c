"""Small models from a configuration and a seed, for demos, tests and benchmarks. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from foreroute.adapters.hf.folder import check_depth, require_memory
from foreroute.errors import ConfigError

READ_BUT_NOT_DECLARED = {"head_dim"}
"""Fields that modelling code reads from a configuration whose class does not declare them."""


def build_model(family: str, *, seed: int, experts_implementation: str = "grouped_mm", **sizes: Any) -> Any:
    """A causal language model with random weights, in float32 on the CPU.

    Args:
        family: a model type of transformers, such as "qwen3_moe".
        seed: of the initial weights; the global random state is left alone.
        experts_implementation: "eager", "grouped_mm" or "batched_mm".
        **sizes: fields of the family's configuration.

    Raises:
        ConfigError: for a family that transformers does not know, a field that it lacks, or sizes that do not fit one
            another or this machine's memory.
    """
    if family not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"transformers {transformers.__version__} has no model type {family!r}")
    config_class = transformers.CONFIG_MAPPING[family]
    known = config_class()
    unknown = sorted(name for name in sizes if not hasattr(known, name) and name not in READ_BUT_NOT_DECLARED)
    if unknown:
        raise ConfigError(f"{config_class.__name__} has no field {', '.join(unknown)}; see its documentation")
    check_depth(sizes, f"a {family} model")
    try:
        config = config_class(**sizes)
        require_memory(config, f"a {family} model of these sizes", dtype=torch.float32)
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, experts_implementation=experts_implementation, trust_remote_code=False
            )
    except ConfigError:
        raise
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"a {family} model cannot be made with these sizes: {error}") from error

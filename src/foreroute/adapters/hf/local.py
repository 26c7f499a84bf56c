"""A model from a local folder or configuration file. Nothing is downloaded, and no code of the model's own is run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from foreroute.adapters.hf.folder import (
    check_config,
    has_weights,
    loading,
    require_files,
    require_memory,
    require_there,
    why,
)
from foreroute.errors import ConfigError


def load_local(path: Path) -> tuple[Any, bool]:
    """A causal language model, and whether its weights were there.

    Args:
        path: a folder with config.json, with or without weights, or a config.json itself. Without weights the model is
            filled at random, which is enough to see whether replay is wired.

    Raises:
        ConfigError: when there is no configuration, weights are pickled or incomplete, or transformers cannot make the
            model.
    """
    require_there(path)
    if os.path.isdir(path):
        _require_config(path)
        if has_weights(path):
            return _pretrained(path), True
        path = path / "config.json"
    check_config(path)
    try:
        with loading():
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        require_memory(config, str(path), dtype=config.dtype or torch.float32)
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(0)
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False), False
    except ConfigError:
        raise
    except Exception as error:  # transformers raises what its loaders raise
        raise ConfigError(f"{path} cannot be loaded by transformers: {why(error)}") from error


def load_pretrained(folder: Path, *, experts_implementation: str) -> Any:
    """A causal language model with all its weights, in float32 on the CPU, to be trained.

    Args:
        folder: with config.json and safetensors.
        experts_implementation: "eager", "grouped_mm" or "batched_mm", where the family has a choice.

    Raises:
        ConfigError: when one of them is missing, transformers cannot load them, or they are not those of one another.
    """
    require_there(folder)
    _require_config(folder)
    if not has_weights(folder):
        raise ConfigError(f"{folder} holds no *.safetensors; name the folder of a Hugging Face model with its weights")
    model = _pretrained(folder, dtype=torch.float32)
    # a family without a choice refuses to be given one
    with suppress(ValueError):
        model.set_experts_implementation(experts_implementation)
    return model


def _require_config(folder: Path) -> None:
    if not os.path.isfile(folder / "config.json"):
        raise ConfigError(f"{folder} holds no config.json; name a folder of a Hugging Face model, or its config.json")
    require_files(folder)
    check_config(folder / "config.json")


def _pretrained(folder: Path, **options: Any) -> Any:
    try:
        with loading():
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # transformers raises what its loaders raise
        raise ConfigError(f"{folder} cannot be loaded by transformers: {why(error)}") from error
    # transformers fills what it does not find at random, and says so in a warning alone
    missing = sorted(map(str, {*found["missing_keys"], *found["mismatched_keys"]}))
    if missing:
        raise ConfigError(
            f"the weights in {folder} are not those of its config.json: {len(missing)} are missing or of another shape "
            f"({', '.join(missing[:3])}, …); copy the folder again"
        )
    return model

"""A model from a local folder or configuration file. Nothing is downloaded, and no code of the model's own is run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from foreroute.adapters.checkpoint import without_progress_bars
from foreroute.errors import ConfigError


def load_local(path: Path) -> tuple[Any, bool]:
    """A causal language model, and whether its weights were there.

    Args:
        path: a folder with config.json, with or without weights, or a config.json itself. Without weights the model is
            filled at random, which is enough to see whether replay is wired.

    Raises:
        ConfigError: when there is no configuration, or transformers cannot make the model.
    """
    require_there(path)
    folder = path.parent if path.is_file() else path
    config_file = path if path.is_file() else path / "config.json"
    if not config_file.is_file():
        raise ConfigError(f"{path} holds no config.json; name a folder of a Hugging Face model, or its config.json")
    has_weights = path.is_dir() and any(folder.glob("*.safetensors"))
    try:
        if has_weights:
            with without_progress_bars():
                return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True), True
        config = transformers.AutoConfig.from_pretrained(config_file, local_files_only=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return transformers.AutoModelForCausalLM.from_config(config), False
    except Exception as error:  # transformers raises what its loaders raise
        raise ConfigError(f"{path} cannot be loaded by transformers: {str(error).partition(chr(10))[0]}") from error


def load_pretrained(folder: Path, *, experts_implementation: str) -> Any:
    """A causal language model with all its weights, in float32 on the CPU, to be trained.

    Args:
        folder: with config.json and safetensors.
        experts_implementation: "eager", "grouped_mm" or "batched_mm", where the family has a choice.

    Raises:
        ConfigError: when one of them is missing, transformers cannot load them, or they are not those of one another.
    """
    require_there(folder)
    for name in ("config.json", "*.safetensors"):
        if not any(folder.glob(name)):
            raise ConfigError(f"{folder} holds no {name}; name the folder of a Hugging Face model with its weights")
    try:
        with without_progress_bars():
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # transformers raises what its loaders raise
        raise ConfigError(f"{folder} cannot be loaded by transformers: {str(error).partition(chr(10))[0]}") from error
    # transformers fills what it does not find at random, and says so in a warning alone
    missing = sorted(map(str, {*loading["missing_keys"], *loading["mismatched_keys"]}))
    if missing:
        raise ConfigError(
            f"the weights in {folder} are not those of its config.json: {len(missing)} are missing or of another shape "
            f"({', '.join(missing[:3])}, …); copy the folder again"
        )
    # a family without a choice refuses to be given one
    with suppress(ValueError):
        model.set_experts_implementation(experts_implementation)
    return model


def require_there(path: Path) -> None:
    """Refuses a path that leads nowhere, such as the name of a model on the Hugging Face Hub.

    Raises:
        ConfigError: when there is neither a folder nor a file.
    """
    if not path.exists():
        raise ConfigError(
            f"there is nothing at {path.absolute()}; name a local folder. Nothing is downloaded: "
            f"hf download NAME --local-dir FOLDER fetches a model of the Hugging Face Hub"
        )

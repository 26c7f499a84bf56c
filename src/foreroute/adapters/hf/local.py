"""A model from a local folder or configuration file. Nothing is downloaded, and no code of the model's own is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from foreroute.errors import ConfigError


def load_local(path: Path) -> tuple[Any, bool]:
    """A causal language model, and whether its weights were there.

    Args:
        path: a folder with config.json, with or without weights, or a config.json itself. Without weights the model is
            filled at random, which is enough to see whether replay is wired.

    Raises:
        ConfigError: when there is no configuration, or transformers cannot make the model.
    """
    folder = path.parent if path.is_file() else path
    config_file = path if path.is_file() else path / "config.json"
    if not config_file.is_file():
        raise ConfigError(f"{path} holds no config.json; name a folder of a Hugging Face model, or its config.json")
    has_weights = path.is_dir() and any(folder.glob("*.safetensors"))
    try:
        if has_weights:
            return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True), True
        config = transformers.AutoConfig.from_pretrained(config_file, local_files_only=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return transformers.AutoModelForCausalLM.from_config(config), False
    except Exception as error:  # transformers raises what its loaders raise
        raise ConfigError(f"{path} cannot be loaded by transformers: {str(error).partition(chr(10))[0]}") from error

"""What a folder of a Hugging Face model or tokenizer may hold, looked at before transformers opens anything in it.

Nothing is downloaded, no code of the folder is run, and no pickle is read: the calls of transformers say so, and what
they do not cover is refused here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from foreroute.errors import ConfigError
from foreroute.files import RegularFile, parse_json, read_text

INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MOST_JSON_BYTES = 64 << 20
"""Of config.json, and of an index, which has a line for each tensor."""
MOST_LAYERS, MOST_EXPERTS, MOST_LAYER_EXPERTS = 1024, 65_536, 1 << 18
"""transformers makes an object for each layer, and in some families for each expert. Published models have up to about
100 layers of 512 experts."""
BUILT_IN = {"attn_implementation": ("eager", "sdpa"), "experts_implementation": ("eager", "grouped_mm", "batched_mm")}
"""Other values make transformers fetch a kernel from the Hugging Face Hub and run it."""

_LAYERS, _EXPERTS = re.compile(r"(^|_)(layers?|depth)$"), re.compile(r"(^|_)experts$")


def require_there(path: Path) -> None:
    """Refuses a path that leads nowhere, such as the name of a model on the Hugging Face Hub.

    Raises:
        ConfigError: when there is neither a folder nor a file.
    """
    if not os.path.exists(path):  # unlike Path.exists, false for a name that is too long
        raise ConfigError(
            f"there is nothing at {os.path.abspath(path)!s:.400}; name a local folder. Nothing is downloaded: "
            f"hf download NAME --local-dir FOLDER fetches a model of the Hugging Face Hub"
        )


def require_files(folder: Path) -> None:
    """Refuses a folder in which something is neither a file nor a folder: reading a FIFO or a device may never end.

    Raises:
        ConfigError: naming it.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.exists() and not path.is_dir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror})") from error
    for path in paths:
        RegularFile(path, ConfigError).close()


def check_config(path: Path) -> None:
    """Refuses a config.json that asks for code, for weights elsewhere, or for more layers than a model can have.

    Raises:
        ConfigError: saying what it asks for.
    """
    values = parse_json(read_text(path, ConfigError, most_bytes=MOST_JSON_BYTES), ConfigError, name=str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, not an object; expected a configuration")
    if "auto_map" in values and values.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{path} is of model type {values.get('model_type')!r:.80}, which transformers {transformers.__version__} "
            "does not have, and needs code of its own (auto_map); none of a folder's is run"
        )
    if "transformers_weights" in values:
        raise ConfigError(
            f"{path} has transformers_weights, which names other files; weights are read from *.safetensors"
        )
    for key, value in _entries(values):
        usual = BUILT_IN.get(key.removeprefix("_").removesuffix("_internal"))
        if usual is not None and isinstance(value, str) and value not in usual:
            raise ConfigError(
                f"{path} asks for {key} = {value!r:.80}, which may be code of others; leave it out, or take one of "
                f"{', '.join(usual)}"
            )
    check_depth(values, str(path))


def check_depth(values: Any, name: str) -> None:
    """Refuses more layers or experts than can be made in a minute.

    Args:
        values: a model's configuration, tables within tables.
        name: of it, for the message.

    Raises:
        ConfigError: naming the key.
    """
    most = {_LAYERS: 1, _EXPERTS: 1}
    for key, value in _entries(values):
        for kind, bound in ((_LAYERS, MOST_LAYERS), (_EXPERTS, MOST_EXPERTS)):
            if isinstance(value, int) and kind.search(key):
                if value > bound:
                    raise ConfigError(f"{name}: {key} is {value}; expected {bound} at most")
                most[kind] = max(most[kind], value)
    if most[_LAYERS] * most[_EXPERTS] > MOST_LAYER_EXPERTS:
        raise ConfigError(
            f"{name}: {most[_LAYERS]} layers of {most[_EXPERTS]} experts; expected {MOST_LAYER_EXPERTS} in all at most"
        )


def has_weights(folder: Path) -> bool:
    """Whether the folder has weights in safetensors.

    Raises:
        ConfigError: when it has weights that are pickled instead, an adapter beside them, or an index that names other
            files than those.
    """
    names = sorted(path.name for path in folder.iterdir())
    if "adapter_config.json" in names:
        raise ConfigError(
            f"{folder} holds an adapter (adapter_config.json), which would be put around the model; merge it into the "
            "weights (merge_and_unload of peft), or move it away"
        )
    if any(name.endswith(".safetensors") for name in names):
        if INDEX in names:
            _check_index(folder / INDEX)
        return True
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        raise ConfigError(
            f"{folder} holds {pickled[0]}, a pickle, which is never read, and no *.safetensors; convert the weights "
            "with save_pretrained of transformers where you trust them, or download the model's safetensors"
        )
    return False


def require_memory(config: Any, name: str, *, dtype: torch.dtype) -> None:
    """Refuses a model that is larger than this machine's memory, before it is made.

    Args:
        config: of transformers.
        name: of it, for the message.
        dtype: of the weights.

    Raises:
        ConfigError: with both sizes.
    """
    try:
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception:  # what is wrong with it shows when it is made; some families cannot be made without memory
        return
    wanted = sum(tensor.numel() * tensor.element_size() for tensor in empty.parameters())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > there:
        raise ConfigError(
            f"{name}: the model would take {wanted / 1e9:,.0f} GB, this machine has {there / 1e9:,.0f} GB of memory; "
            "take a smaller model, or fewer layers of this one"
        )


def why(error: BaseException) -> str:
    """The first line of what transformers says, without advice that is no use here."""
    text = str(error).partition("\n")[0]
    if "custom code" in text:
        return "it needs code of its own (auto_map); none of a folder's is run"
    return f"{type(error).__name__}: {text:.400}" if text else type(error).__name__


def _check_index(path: Path) -> None:
    index = parse_json(read_text(path, ConfigError, most_bytes=MOST_JSON_BYTES), ConfigError, name=str(path))
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        raise ConfigError(f"{path} has no weight_map; copy the folder again")
    for shard in shards.values():
        if not (isinstance(shard, str) and shard.endswith(".safetensors") and os.path.basename(shard) == shard):
            raise ConfigError(f"{path} names {shard!r:.80}; expected safetensors of its own folder alone")


def _entries(values: Any) -> Iterator[tuple[str, Any]]:
    """Every value of nested objects and lists, with the key that it is under."""
    waiting = [("", values)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            # what is under "" of {"attn_implementation": {"": "sdpa"}} is of the outer key
            waiting += [(name or key, inner) for name, inner in value.items() if isinstance(name, str)]
        elif isinstance(value, list | tuple):
            waiting += [(key, inner) for inner in value]

"""Loading of models and tokenizers from this machine: from a folder, a config.json, or a family and sizes.

Nothing is downloaded, no code of a folder is run, and no pickle is read: the calls of transformers say so, and what
they do not cover is refused before transformers opens anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from foreroute.adapters.checkpoint import CONFIG, MOST_JSON_BYTES, quiet_transformers, weight_files
from foreroute.errors import ConfigError
from foreroute.files.regular import open_regular, parse_json, read_text

READ_BUT_NOT_DECLARED = {"head_dim"}
"""Fields that modelling code reads from a configuration whose class does not declare them."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MOST_LAYERS, MOST_EXPERTS, MOST_LAYER_EXPERTS = 1024, 65_536, 1 << 18
"""transformers makes an object for each layer, and in some families for each expert. Published models have up to about
100 layers of 512 experts."""
BUILT_IN = {"attn_implementation": ("eager", "sdpa"), "experts_implementation": ("eager", "grouped_mm", "batched_mm")}
"""Other values make transformers fetch a kernel from the Hugging Face Hub and run it."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""The folder of a tokenizer has one of these. Without, transformers may make an empty one."""

_LAYERS, _EXPERTS = re.compile(r"(^|_)(layers?|depth)$"), re.compile(r"(^|_)experts$")


def load_local(path: Path) -> tuple[Any, bool]:
    """Load a causal language model from a folder or a config.json; return it, and whether its weights were there."""
    _require_path(path)
    if os.path.isdir(path):
        if _check_folder(path):
            return load_complete(transformers.AutoModelForCausalLM, path, path), True
        path = path / CONFIG
    config = read_config(path)
    # random weights are enough to see whether replay is wired
    with transformers_errors(f"{path} cannot be loaded by transformers"), _seeded(0):
        _require_memory(config, str(path), dtype=config.dtype or torch.float32)
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False), False


def load_pretrained(folder: Path, *, experts_implementation: str, distributed_config: Any = None) -> Any:
    """Load a causal language model with all its weights in float32, on the CPU or spread by `distributed_config`."""
    _require_path(folder)
    if not _check_folder(folder):
        raise ConfigError(f"{folder} holds no *.safetensors; name the folder of a Hugging Face model with its weights")
    # older releases know no such argument
    spread = {} if distributed_config is None else {"distributed_config": distributed_config}
    model = load_complete(transformers.AutoModelForCausalLM, folder, folder, dtype=torch.float32, **spread)
    # a family without a choice refuses to be given one
    with suppress(ValueError):
        model.set_experts_implementation(experts_implementation)
    return model


def build_model(family: str, *, seed: int, experts_implementation: str = "grouped_mm", **sizes: Any) -> Any:
    """Build a causal language model with random weights, in float32 on the CPU.

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
    _check_depth(sizes, f"a {family} model")
    try:
        config = config_class(**sizes)
        _require_memory(config, f"a {family} model of these sizes", dtype=torch.float32)
        with _seeded(seed):
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, experts_implementation=experts_implementation, trust_remote_code=False
            )
    except ConfigError:
        raise
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"a {family} model cannot be made with these sizes: {error}") from error


def spread_over(num_ranks: int) -> Any:
    """Return the `distributed_config` by which transformers spreads a model and its experts over all ranks."""
    from transformers import distributed

    if "ep_implementation" not in distributed.DistributedConfig.__dataclass_fields__:
        raise ConfigError(
            f"transformers {transformers.__version__} has no registry of expert parallelism; install 5.23 or newer"
        )
    return distributed.DistributedConfig(fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation="foreroute")


def build_spread(family: str, *, num_ranks: int, experts_implementation: str = "grouped_mm", **sizes: Any) -> Any:
    """Build a model as `build_model`, spread over all ranks, of which none ever has all of it. A collective call.

    Its weights, random numbers of each rank's own, are of no use but to look at it.
    """
    with torch.device("meta"):
        empty = build_model(family, seed=0, experts_implementation=experts_implementation, **sizes)
    zeros = {name: torch.zeros((), dtype=each.dtype).expand(each.shape) for name, each in empty.state_dict().items()}
    model = load_complete(
        type(empty),
        None,
        f"a new {family} model",
        config=empty.config,
        state_dict=zeros,
        dtype=torch.float32,
        experts_implementation=experts_implementation,
        distributed_config=spread_over(num_ranks),
    )
    generator = torch.Generator(model.device).manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.detach().to_local().normal_(std=0.02, generator=generator)
    return model


def spread(whole: Any, device: torch.device, implementation: str = "foreroute") -> Any:
    """Return the model with its experts spread over all ranks, and FSDP2 over the same. A collective call.

    The whole model, on the CPU and the same on every rank, is not to be used any more.
    """
    config = replace(spread_over(dist.get_world_size()), ep_implementation=implementation)
    if config.ep_size > 1:
        weights, dtype = whole.state_dict(), whole.dtype
        with quiet_transformers():
            return type(whole).from_pretrained(
                None, config=whole.config, state_dict=weights, dtype=dtype, distributed_config=config
            )
    # transformers spreads nothing over one rank: there the implementation is put on the experts of the model itself
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    mesh = init_device_mesh(device.type, (1,))
    dispatched = {rule: style for rule, style in whole.ep_plan.items() if style == "ep_dispatch_experts"}
    apply_expert_parallelism(whole.to(device), mesh, mesh, whole._expand_parallel_plan(dispatched), implementation)
    return whole


def load_complete(model_class: Any, source: Path | None, folder: Path | str, **options: Any) -> Any:
    """Call `model_class.from_pretrained`; raise `ConfigError`, which names `folder`, when weights are missing."""
    with transformers_errors(f"{folder} cannot be loaded by transformers"), quiet_transformers():
        model, found = model_class.from_pretrained(
            source,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are named below
            output_loading_info=True,
            **options,
        )
    # transformers fills what it does not find at random, and says so in a warning alone
    missing = sorted(map(str, {*found["missing_keys"], *found["mismatched_keys"]}))
    if missing:
        raise ConfigError(
            f"the weights in {folder} are not those of its config.json: {len(missing)} are missing or of another shape "
            f"({', '.join(missing[:3])}, …); copy the folder again"
        )
    return model


def read_config(path: Path) -> Any:
    """Read a config.json by transformers; refuse one that asks for code, other weights, a kernel or too many layers."""
    values = _check_config(path)
    with transformers_errors(f"{path} cannot be loaded by transformers"), quiet_transformers():
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
    if text is not config:
        _require_sizes_read(values, text, path)
    return config


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder; raise `ConfigError` when there is none, or transformers cannot read it."""
    _require_path(folder)
    _require_files(folder)
    if not any(os.path.isfile(folder / name) for name in TOKENIZERS):
        raise ConfigError(
            f"{folder} holds no tokenizer (none of {', '.join(TOKENIZERS)}); name the folder that has it as "
            "model.tokenizer"
        )
    with transformers_errors(f"the tokenizer in {folder} cannot be read"), quiet_transformers():
        loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not loaded.get_vocab():
        raise ConfigError(f"the tokenizer in {folder} cannot be read: it has no tokens")
    return loaded


def first_line(error: BaseException) -> str:
    """Return the first line of an error of transformers, without advice that is of no use here."""
    text = str(error).partition("\n")[0]
    if "custom code" in text:
        return "it needs code of its own (auto_map); none of a folder's is run"
    return f"{type(error).__name__}: {text:.400}" if text else type(error).__name__


@contextmanager
def transformers_errors(what: str) -> Iterator[None]:
    """Raise `ConfigError`, which begins with `what`, for whatever transformers raises in the context."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # its loaders raise whatever what they call raises
        raise ConfigError(f"{what}: {first_line(error)}") from error


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generator of the CPU while the context is open."""
    # not torch.manual_seed, which seeds generators of devices too, and would have to set up each of them to restore it
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _require_path(path: Path) -> None:
    if not os.path.exists(path):  # unlike Path.exists, false for a name that is too long
        raise ConfigError(
            f"there is nothing at {os.path.abspath(path)!s:.400}; name a local folder. Nothing is downloaded: "
            f"hf download NAME --local-dir FOLDER fetches a model of the Hugging Face Hub"
        )


def _require_files(folder: Path) -> None:
    """Refuse a folder with something that is neither a file nor a folder."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.exists() and not path.is_dir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror})") from error
    # to read a FIFO or a device may never end
    for path in paths:
        open_regular(path, ConfigError).close()


def _check_folder(folder: Path) -> bool:
    """Check the folder of a model before transformers opens anything; tell whether it has weights in safetensors."""
    if not os.path.isfile(folder / CONFIG):
        raise ConfigError(f"{folder} holds no config.json; name a folder of a Hugging Face model, or its config.json")
    _require_files(folder)
    _check_config(folder / CONFIG)
    names = sorted(path.name for path in folder.iterdir())
    if "adapter_config.json" in names:
        raise ConfigError(
            f"{folder} holds an adapter (adapter_config.json), which would be put around the model; merge it into the "
            "weights (merge_and_unload of peft), or move it away"
        )
    if weight_files(folder):
        return True
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        raise ConfigError(
            f"{folder} holds {pickled[0]}, a pickle, which is never read, and no *.safetensors; convert the weights "
            "with save_pretrained of transformers where you trust them, or download the model's safetensors"
        )
    return False


def _check_config(path: Path) -> dict[str, Any]:
    """Read a config.json; refuse one that asks for code, for weights elsewhere, or for impossibly many layers."""
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
    _check_depth(values, str(path))
    return values


def _check_depth(values: Any, name: str) -> None:
    """Refuse a configuration of more layers or experts than can be made in a minute."""
    most = {_LAYERS: 1, _EXPERTS: 1}
    for key, value in _entries(values):
        for pattern, bound in ((_LAYERS, MOST_LAYERS), (_EXPERTS, MOST_EXPERTS)):
            if isinstance(value, int) and pattern.search(key):
                if value > bound:
                    raise ConfigError(f"{name}: {key} is {value}; expected {bound} at most")
                most[pattern] = max(most[pattern], value)
    if most[_LAYERS] * most[_EXPERTS] > MOST_LAYER_EXPERTS:
        raise ConfigError(
            f"{name}: {most[_LAYERS]} layers of {most[_EXPERTS]} experts; expected {MOST_LAYER_EXPERTS} in all at most"
        )


def _require_sizes_read(values: dict[str, Any], text: Any, path: Path) -> None:
    """Refuse sizes of the decoder beside its table, where transformers reads none and takes the family's defaults."""
    tables = [entry for value in values.values() if isinstance(value, dict) for entry in _entries(value)]
    for key, stated in values.items():
        taken = getattr(text, key, stated)
        is_size = type(stated) is int and not key.endswith("_token_id")
        # a value that a table states itself was read there, and the one outside is of another part
        if is_size and taken != stated and (key, taken) not in tables:
            raise ConfigError(
                f"{path} has {key} = {stated!r:.80} beside text_config, where transformers {transformers.__version__} "
                f"reads no size of a {values['model_type']} model, and takes {taken!r:.80}. Move sizes into "
                f"text_config; or, where all of the file is of a text model, set model_type to {text.model_type}"
            )


def _require_memory(config: Any, name: str, *, dtype: torch.dtype) -> None:
    """Refuse a model that is larger than this machine's memory, before it is made."""
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


def _entries(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value of nested objects and lists, with the key that it is under."""
    # a stack and not recursion, which a hostile file could exhaust
    waiting = [("", values)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            # what is under "" of {"attn_implementation": {"": "sdpa"}} is of the outer key
            waiting += [(name or key, inner) for name, inner in value.items() if isinstance(name, str)]
        elif isinstance(value, list | tuple):
            waiting += [(key, inner) for inner in value]

"""The model that an engine serves, and the checkpoints that bring it new weights.

    ServedModel.of(hf.attach(model))                  a model of transformers in this process
    ServedModel.at(Path("Qwen3-30B-A3B"))             a checkpoint folder, whose layers transformers knows
    ServedModel.at(folder, spec=routed.spec)          the same where a trainer knows its layers: no transformers needed

transformers is imported only where it knows layers, or one of its models is written.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foreroute.checks import whole_number
from foreroute.errors import ConfigError, printable
from foreroute.files.regular import as_path, parse_json, read_text
from foreroute.files.writing import writing_named
from foreroute.trace import IndexerSpec, RoutingSpec

if TYPE_CHECKING:
    from foreroute.adapters.hf import RoutedTransformer

__all__ = ["FolderWriter", "ModelWriter", "ServedModel", "Weights"]

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Tensors by name, or names and tensors one after the other, where all at once would not fit in memory."""

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "*.safetensors"
COPIED = (CONFIG, "generation_config.json")
"""Files that are copied from a checkpoint folder; code is not."""
MOST_COUNT = (1 << 31) - 1
"""Bound of a vocabulary and of a sequence: token ids and positions are int32."""
MOST_JSON_BYTES = 64 << 20
"""Bound of config.json, and of an index, which has a line for each tensor."""
SHARD_BYTES = 4 << 30
"""A little less than the 5 GB that the hub splits checkpoints into. A shard is held in memory while it is filled."""


class CheckpointWriter(Protocol):
    """Writes checkpoints of one model, in the layout of the hub."""

    def write(self, folder: Path, weights: Weights | None = None) -> Path:
        """Write configuration and weights (the first ones if none are given) to a folder that is new or empty.

        Raises:
            ConfigError: when something is in the folder, or it cannot be written.
        """


@dataclass(frozen=True)
class ServedModel:
    """The model that an engine serves.

    Attributes:
        spec: which layers route, among how many experts.
        writer: writes its checkpoints.
        vocabulary_size: tokens that it can be given; None when that is not known.
        indexers: the indexers of its sparse attention; None where it has none, or they are not known.
        max_positions: tokens of the longest sequence that it takes; None when that is not known.
    """

    spec: RoutingSpec
    writer: CheckpointWriter
    vocabulary_size: int | None = None
    indexers: IndexerSpec | None = None
    max_positions: int | None = None

    @classmethod
    def of(cls, routed: RoutedTransformer) -> ServedModel:
        """Describe an attached model of transformers. Weights are named as in its `state_dict()`."""
        model: Any = routed.model
        vocabulary_size, positions = _read_sizes(model.config.get_text_config().to_dict())
        return cls(routed.spec, ModelWriter(model), vocabulary_size, routed.indexers, positions)

    @classmethod
    def at(cls, folder: Path, *, spec: RoutingSpec | None = None) -> ServedModel:
        """Describe the model whose checkpoint lies in a folder. Weights are named as in its files, and are not read.

        Args:
            folder: with a `config.json` and, for engines that foreroute starts, weights in safetensors.
            spec: which layers route. By default transformers makes the model without memory to find its routers;
                nothing of the folder is executed.

        Raises:
            ConfigError: when the configuration or the weights cannot be read, or transformers does not know the model.
            ModuleNotFoundError: when transformers is needed and not installed.
        """
        folder = as_path(folder, ConfigError)
        path, writer = folder / CONFIG, FolderWriter(folder)
        if spec is None:
            from foreroute.adapters.hf.without_weights import structure_of

            spec, indexers, config = structure_of(path)
            vocabulary_size, positions = _read_sizes(config)
            return cls(spec, writer, vocabulary_size, indexers, positions)
        stated = parse_json(read_text(path, ConfigError, most_bytes=MOST_JSON_BYTES), ConfigError, name=str(path))
        # where a model of images or sound keeps its decoder
        for name in ("thinker_config", "text_config"):
            stated = stated.get(name, stated) if isinstance(stated, dict) else stated
        if not isinstance(stated, dict):
            raise ConfigError(f"{path} holds {type(stated).__name__}, not an object; expected a configuration")
        vocabulary_size, positions = _read_sizes(stated)
        return cls(spec, writer, vocabulary_size, None, positions)


class ModelWriter:
    """Writes checkpoints of a model of transformers, which is kept for its configuration and layout.

    In memory transformers 5 holds all experts of a layer in one parameter; `save_pretrained` takes them apart again,
    as engines expect.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def write(self, folder: Path, weights: Weights | None = None) -> Path:
        """As `CheckpointWriter.write`. The first weights are those that the model has now.

        Weights that are given are whole, as `RoutedTransformer.gather_weights` gives them where a model is spread over
        ranks. No other rank is asked then, and without them all write together.
        """
        model = self._model
        config: Any = getattr(model, "config", None)
        if weights is not None and getattr(config, "distributed_config", None) is not None:
            # transformers would gather the weights again, and have the other ranks wait for what this one writes
            config = copy.deepcopy(config)
            config.distributed_config = None
            with torch.device("meta"):
                model = type(self._model)(config)
            model.generation_config = self._model.generation_config
        with _new_checkpoint(folder), quiet_transformers():
            model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
        return folder


class FolderWriter:
    """Writes checkpoints with the configuration and the names of another one, which is read again for each.

    Raises:
        ConfigError: when the folder `source` has files of weights that cannot be read.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._files = weight_files(source)
        self._names: set[str] = set()
        for path in self._files:
            try:
                with safe_open(path, framework="pt") as file:
                    self._names.update(file.keys())
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be read as weights in safetensors ({error})") from error

    def write(self, folder: Path, weights: Weights | None = None) -> Path:
        """As `CheckpointWriter.write`. The first weights are those of the source, which are linked to.

        Raises:
            ConfigError: also when a weight that the source has is missing, or comes twice.
        """
        with _new_checkpoint(folder):
            for name in COPIED:
                if (self._source / name).is_file():
                    shutil.copyfile(self._source / name, folder / name)
            if weights is None:
                if not self._files:
                    raise ConfigError(
                        f"{self._source} has no weights in safetensors, so that no engine can be started on it; name "
                        "the folder of a whole checkpoint"
                    )
                # linked, since a copy of a large checkpoint takes minutes and its room once more
                for path in [*self._files, *self._source.glob(INDEX)]:
                    (folder / path.name).symlink_to(path.resolve())
            # an engine keeps the old value of a weight that a checkpoint lacks, without an error
            elif missing := self._names - _write_shards(folder, weights):
                raise ConfigError(
                    f"{len(missing)} of the {len(self._names)} weights of {self._source} were not given, such as "
                    f"{min(missing)!r}; an engine would keep their old values. Convert the trainer's names to the "
                    "checkpoint's first"
                )
        return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's weights: those that its index names, or without one all in safetensors.

    Raises:
        ConfigError: when the index cannot be read, or names something else than files of its folder in safetensors.
    """
    files, path = sorted(folder.glob(WEIGHTS)), folder / INDEX
    # some checkpoints of the hub have a second copy of their weights, under names of another library, beside an index
    if not files or not path.is_file():
        return files
    index = parse_json(read_text(path, ConfigError, most_bytes=MOST_JSON_BYTES), ConfigError, name=str(path))
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict):
        raise ConfigError(f"{path} has no weight_map; copy the folder again")
    for file in file_of.values():
        if not (isinstance(file, str) and file.endswith(".safetensors") and os.path.basename(file) == file):
            raise ConfigError(f"{path} names {file!r:.80}; expected safetensors of its own folder alone")
    return sorted({folder / file for file in file_of.values()})


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Have transformers draw no progress bars, and escape what it logs, which may quote a folder's files."""
    from transformers.utils import logging as transformers_logging

    def escape(record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), ()
        return True

    with ExitStack() as stack:
        if transformers_logging.is_progress_bar_enabled():
            transformers_logging.disable_progress_bar()
            stack.callback(transformers_logging.enable_progress_bar)
        for handler in transformers_logging.get_logger().handlers:
            handler.addFilter(escape)
            stack.callback(handler.removeFilter, escape)
        yield


def _read_sizes(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Read the size of the vocabulary and the longest sequence of a decoder; None where the configuration has none."""
    vocabulary_size, positions = (
        None
        if config.get(name) is None
        else whole_number(config[name], name=f"{name} of the configuration", most=MOST_COUNT, error=ConfigError)
        for name in ("vocab_size", "max_position_embeddings")
    )
    return vocabulary_size, positions


def whole_weights(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors, gathered one at a time where ranks have shards of them (DTensor)."""
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _write_shards(folder: Path, weights: Weights) -> set[str]:
    """Write weights as they come, a file whenever there are enough, and an index; return all names."""
    file_of: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        name = f"model-{len(set(file_of.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in whole_weights(weights):
        if name in file_of or name in shard:
            raise ConfigError(f"the weight {name!r} was given twice; expected each once")
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        # copied, since tied weights share memory, which the format has no word for
        shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if not file_of:
        raise ConfigError("no weights were given; a generator of weights can be used once")
    if len(files := set(file_of.values())) == 1:
        (folder / files.pop()).rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return set(file_of)


@contextmanager
def _new_checkpoint(folder: Path) -> Iterator[None]:
    """Make a folder, which must be empty, and name it in errors of writing."""
    with writing_named(folder, ConfigError):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; nothing was written. Name a new or an empty folder")
        try:
            yield
        except SafetensorError as error:  # safetensors gives an error of the system as text alone
            raise OSError(None, str(error)) from error

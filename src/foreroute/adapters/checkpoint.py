"""What an engine must know of the model that it serves, and the checkpoints that bring it new weights.

    ServedModel.of(hf.attach(model))        a model of transformers in this process
    ServedModel.at(Path("Qwen3-30B-A3B"))   a checkpoint folder: a trainer on another framework needs no such model

transformers is imported only where one of its models is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foreroute.capture import ModelFacts, facts_of_config
from foreroute.capture.model_config import text_section
from foreroute.capture.model_facts import MOST
from foreroute.capture.recognition import field_of, whole_number
from foreroute.errors import CaptureError, ConfigError
from foreroute.files import parse_json, read_file, writing_named
from foreroute.trace import RoutingSpec

if TYPE_CHECKING:
    from foreroute.adapters.hf import RoutedTransformer

__all__ = ["CheckpointWriter", "FolderWriter", "ModelWriter", "ServedModel", "Weights", "facts_of"]

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Tensors by name, or names and tensors one after the other, where all at once would not fit in memory."""

CONFIG = "config.json"
COPIED = (CONFIG, "generation_config.json")
"""What is taken over from a checkpoint folder; code is not."""
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
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
        facts: what its routes and tokens are read by.
        writer: of its checkpoints.
        max_positions: tokens of the longest sequence that it takes; None when that is not known.
    """

    facts: ModelFacts
    writer: CheckpointWriter
    max_positions: int | None = None

    @classmethod
    def of(cls, routed: RoutedTransformer) -> ServedModel:
        """An attached model of transformers. Weights are named as in its `state_dict()`."""
        config: Any = routed.model.config
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        return cls(facts_of(routed), ModelWriter(routed.model), None if positions is None else int(positions))

    @classmethod
    def at(cls, folder: Path, *, spec: RoutingSpec | None = None) -> ServedModel:
        """The model whose checkpoint lies in a folder. Weights are named as in its files.

        Args:
            folder: with a `config.json` and, for engines that foreroute starts, weights in safetensors.
            spec: which layers route. By default it is read off the configuration.

        Raises:
            ConfigError: when the configuration or the weights cannot be read.
            CaptureError: when the configuration does not say which layers route, or contradicts the spec.
        """
        path = folder / CONFIG
        config = parse_json(read_file(path, ConfigError), ConfigError, name=str(path))
        try:
            section = text_section(config)
            counts = ("num_hidden_layers", "vocab_size", "max_position_embeddings")
            layers, vocabulary_size, positions = (_count(section, name) for name in counts)
            facts = facts_of_config(config) if spec is None else ModelFacts(spec, layers)
        except CaptureError as error:
            raise CaptureError(f"{path}: {error}") from error
        return cls(replace(facts, vocabulary_size=vocabulary_size), FolderWriter(folder), positions)


def facts_of(routed: RoutedTransformer) -> ModelFacts:
    """The spec of an attached model, how many decoder layers an engine counts, its vocabulary and its indexers."""
    config: Any = routed.model.config
    text = config.get_text_config()
    return ModelFacts(routed.spec, int(text.num_hidden_layers), int(text.vocab_size), routed.indexers)


class ModelWriter:
    """Writes checkpoints of a model of transformers.

    In memory transformers 5 holds all experts of a layer in one parameter; `save_pretrained` takes them apart again,
    as engines expect.

    Args:
        model: a transformers model; kept, for its configuration and layout.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def write(self, folder: Path, weights: Weights | None = None) -> Path:
        """As `CheckpointWriter.write`. The first weights are those that the model has now."""
        with _new_checkpoint(folder), without_progress_bars():
            self._model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
        return folder


class FolderWriter:
    """Writes checkpoints that have the configuration of another one, and its names.

    Args:
        source: the folder of the other checkpoint; kept, and read again for each new one.

    Raises:
        ConfigError: when it has files of weights that cannot be read.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._names = _tensor_names(source)

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
                self._link(folder)
            else:
                self._require_all(_write_shards(folder, weights))
        return folder

    def _link(self, folder: Path) -> None:
        if not self._names:
            raise ConfigError(
                f"{self._source} has no weights in safetensors, so that no engine can be started on it; name the "
                "folder of a whole checkpoint"
            )
        for path in [*self._source.glob(WEIGHTS), *self._source.glob(INDEX)]:
            (folder / path.name).symlink_to(path.resolve())

    def _require_all(self, written: set[str]) -> None:
        """An engine keeps the old value of a weight that a checkpoint lacks, and says nothing."""
        if missing := self._names - written:
            raise ConfigError(
                f"{len(missing)} of the {len(self._names)} weights of {self._source} were not handed over, such as "
                f"{min(missing)!r}; an engine would keep their old values. Convert the trainer's names to the "
                "checkpoint's first"
            )


def _write_shards(folder: Path, weights: Weights) -> set[str]:
    """Write weights as they come, a file whenever there are enough. The names of all."""
    file_of: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        name = f"model-{len(set(file_of.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        if name in file_of or name in shard:
            raise ConfigError(f"the weight {name!r} was handed over twice; expected each once")
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        # copied, since tied weights share memory, which the format has no word for
        shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if not file_of:
        raise ConfigError("no weights were handed over; a generator of weights can be used once")
    if len(files := set(file_of.values())) == 1:
        (folder / files.pop()).rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return set(file_of)


def _tensor_names(source: Path) -> set[str]:
    names: set[str] = set()
    for path in source.glob(WEIGHTS):
        try:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read as weights in safetensors ({error})") from error
    return names


def _count(section: Any, name: str) -> int | None:
    value = field_of(section, name)
    return None if value is None else whole_number(value, f"{name} of the configuration", 1, MOST)


@contextmanager
def _new_checkpoint(folder: Path) -> Iterator[None]:
    """While a checkpoint is written to a folder, which is made, or must be empty."""
    with writing_named(folder, ConfigError):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; nothing was written. Name a new or an empty folder")
        try:
            yield
        except SafetensorError as error:  # what the system refuses while tensors are written, as text alone
            raise OSError(None, str(error)) from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """While the context is open, transformers draws none."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()

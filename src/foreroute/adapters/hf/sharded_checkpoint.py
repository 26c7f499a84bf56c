"""Folders of transformers of which a rank reads its own experts, and which ranks write together block by block.

No rank ever has the whole model.

transformers loads what it is given: a model whose experts have this rank's rows alone, and of the folder's tensors
those rows. How a family saves its experts is left to transformers, which puts one tensor for each expert, or one for
all of them, where they belong.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from errno import EEXIST
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from foreroute.adapters.hf.local_models import (
    INDEX,
    load_complete,
    loading,
    read_config,
    require_weights,
    weight_files,
    why,
)
from foreroute.ep import ExpertParallelModel
from foreroute.ep.shards import keep_experts
from foreroute.errors import ConfigError
from foreroute.files.regular import as_path

ONE_EXPERT = re.compile(r"experts\.(\d+)\.")
"""In the name of a tensor of one expert."""
ALL_EXPERTS = re.compile(r"(?<!shared_)experts\.[a-z_]+$")
"""The name of a tensor that has a row for each expert."""

MOST_BYTES = "1TB"
"""Size of a file at most: each block is written into one file."""


@dataclass(frozen=True, eq=False)
class ShardedCheckpoint:
    """A folder that holds the weights of its configuration.

    Attributes:
        folder: with config.json and safetensors.
        empty: its model, on the meta device.
    """

    folder: Path
    empty: Any

    @classmethod
    def opened(cls, place: str | os.PathLike[str]) -> ShardedCheckpoint:
        """Look at its configuration and its files' names.

        Raises:
            ConfigError: when there are no weights, or transformers cannot make the model.
        """
        folder = as_path(place, ConfigError)
        require_weights(folder)
        config = read_config(folder / "config.json")
        try:
            with loading(), torch.device("meta"):
                empty = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except Exception as error:  # transformers raises what its classes raise
            raise ConfigError(f"{folder} cannot be loaded by transformers: {why(error)}") from error
        return cls(folder, empty)

    def load(self, paths: Sequence[str], here: range, dtype: torch.dtype | None) -> Any:
        """The model, whose experts modules at `paths` have the rows `here` alone.

        Raises:
            ConfigError: when weights are missing, or not those of the configuration.
        """
        kind: Any = type(self.empty)
        num_experts = int(self.empty.get_submodule(paths[0]).num_experts)

        def made_here(model: Any, *args: Any, **kwargs: Any) -> None:
            kind.__init__(model, *args, **kwargs)
            for path in paths:
                keep_experts(model.get_submodule(path), np.arange(here.start, here.stop))

        cut: Any = type(kind.__name__, (kind,), {"__init__": made_here, "__module__": kind.__module__})
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(self.folder)]
            tensors = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
            state = {
                name: _own(name, tensor, here, num_experts) for name, tensor in tensors.items() if _is_read(name, here)
            }
            dtype = dtype or self.empty.config.dtype or torch.float32
            model = load_complete(cut, None, self.folder, config=self.empty.config, state_dict=state, dtype=dtype)
        model.__class__ = kind
        return model


def save_pretrained(placed: ExpertParallelModel, folder: str | os.PathLike[str]) -> None:
    """Write a placed model as transformers saves the whole one. A collective call, in which rank 0 writes.

    One block of the model is whole on a rank at a time. The folder is there when all of it is. With PEFT's adapters it
    has these alone, as PEFT saves them, and no weights of experts are gathered.

    Args:
        placed: with any homes.
        folder: that does not exist.

    Raises:
        ConfigError: on every rank alike, when rank 0 cannot write it.
        TransferError: when a rank does not answer.
    """
    writer = _Writer(as_path(folder, ConfigError))

    def on_first_rank(work: Callable[[], None]) -> None:
        problem: Exception | None = None
        if placed.consensus.rank == 0:
            try:
                work()
            except Exception as error:  # transformers and safetensors raise what they like, and all ranks end alike
                problem = error
                writer.close()
        reason = None if problem is None else getattr(problem, "strerror", None) or str(problem)
        said = None if reason is None else f"{folder} cannot be written ({reason}); name a new folder with room for it"
        if objections := placed.consensus.objections(said, f"writing {folder}"):
            raise ConfigError(objections[0]) from problem

    on_first_rank(writer.begin)
    if hasattr(placed.model, "peft_config"):
        on_first_rank(partial(writer.add_adapters, placed.model, _beside_experts(placed)))
    else:
        for state in placed.state_dicts():
            on_first_rank(partial(writer.add, placed.model, state))
        on_first_rank(writer.add_index)
    on_first_rank(writer.end)


def _beside_experts(placed: ExpertParallelModel) -> dict[str, Tensor]:
    """Every parameter but the weights of experts, whole. A collective call."""
    experts = {id(parameter) for layer in placed.layers for parameter in layer.module.parameters(recurse=False)}
    beside = {name: each for name, each in placed.model.named_parameters() if id(each) not in experts}
    return {name: placed.whole(parameter, parameter) for name, parameter in beside.items()}


class _Writer:
    """Writes a folder beside its place and moves it there when it is complete; replaces what a killed writer left."""

    def __init__(self, target: Path) -> None:
        self._target, self._folder = target, target.with_name(f".{target.name}.part")
        self._file_of: dict[str, str] = {}
        self._num_files, self._num_bytes = 0, 0

    def begin(self) -> None:
        if self._target.exists():
            raise FileExistsError(EEXIST, "it is there already")
        self.close()
        self._folder.mkdir()

    def add(self, model: Any, state: Mapping[str, Tensor]) -> None:
        """Let transformers write a part of the weights, by the names that its files have, and take them up."""
        self._num_files += 1
        part, name = self._folder / "part", f"model-{self._num_files:05}.safetensors"
        with loading():
            model.save_pretrained(part, state_dict=dict(state), max_shard_size=MOST_BYTES)
        with safe_open(part / "model.safetensors", framework="pt") as file:
            self._file_of |= dict.fromkeys(file.keys(), name)
        self._num_bytes += sum(tensor.nbytes for tensor in state.values())
        (part / "model.safetensors").rename(self._folder / name)
        for other in part.iterdir():
            other.rename(self._folder / other.name)
        part.rmdir()

    def add_adapters(self, model: Any, state: Mapping[str, Tensor]) -> None:
        """Let PEFT write what it saves of the weights."""
        with loading():
            model.save_pretrained(self._folder, state_dict=dict(state))

    def add_index(self) -> None:
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._file_of}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def end(self) -> None:
        self._folder.rename(self._target)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_read(name: str, here: range) -> bool:
    """Whether a tensor has anything for this rank."""
    expert = ONE_EXPERT.search(name)
    return expert is None or int(expert[1]) in here


def _own(name: str, tensor: Any, here: range, num_experts: int) -> Any:
    """A tensor of the folder, or this rank's rows of one that has a row for each expert."""
    has_all = ALL_EXPERTS.search(name) and tensor.get_shape()[:1] == [num_experts]
    return FileRows(tensor, here) if has_all else tensor


class FileRows:
    """Some rows of a tensor in a file, read when it is asked for its values."""

    def __init__(self, tensor: Any, rows: range) -> None:
        self._tensor, self._rows = tensor, rows

    def __getitem__(self, _: Any) -> Tensor:
        rows: Tensor = self._tensor[self._rows.start : self._rows.stop]
        return rows

    def get_shape(self) -> list[int]:
        """[rows, ...]."""
        return [len(self._rows), *self._tensor.get_shape()[1:]]

    def get_dtype(self) -> Any:
        """As safetensors spells it."""
        return self._tensor.get_dtype()

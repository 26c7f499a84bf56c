"""Checkpoints: the state of a trainer in one file, and nothing of it is executed to read it.

`CHECKPOINT_FILE` declares the file. Its tensors are those of the state, each named by its place
("optimizer/state/0/exp_avg"). Its metadata are

    state     the state as JSON, with a reference in the place of each tensor
    config    a digest of the configuration that it was trained with
    metrics   a digest of the lines of metrics.jsonl of all steps before

In the JSON a list, a text, a number, true, false and null are themselves. An object has one of three forms:
{"tensor": name}, {"dict": [[key, value], ...]} and {"tuple": [...]}. A tensor without axes is written with one, and has
"scalar": true; one of a type that numpy lacks is written as integers of its bits, and has "type": its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import RunFolderError
from foreroute.files import FileFormat, parse_json
from foreroute.files.container import MOST_HEADER_BYTES

CHECKPOINT_FILE = FileFormat(
    name="checkpoint",
    version=2,
    kind=RunFolderError,
    metadata=("state", "config", "metrics"),
    tensors=None,
    made_by="foreroute train writes checkpoints",
    most_header_bytes=MOST_HEADER_BYTES,
)
NAME = re.compile(r"step-(\d{6}|[1-9]\d{6,})\.safetensors")
"""The name of a checkpoint in a run's folder, with its step."""
DEEPEST = 64
"""States nest far less; what nests deeper would end in the interpreter's stack."""
WITHOUT_NUMPY = {"bfloat16": (torch.bfloat16, torch.int16)}
"""Types of torch that numpy lacks, and what their bits are written as."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    Attributes:
        state: of the trainer; "step" is the next step, "model" the weights.
        config: the digest of the configuration.
        metrics: the digest of the lines of the steps before.
    """

    state: dict[str, Any]
    config: str
    metrics: str


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint: the whole file or nothing.

    Raises:
        RunFolderError: when it cannot be written; a file that was there is whole.
    """
    tensors: dict[str, NDArray[Any]] = {}
    tree = _without_tensors(checkpoint.state, "", tensors, {})
    metadata = {"state": json.dumps(tree), "config": checkpoint.config, "metrics": checkpoint.metrics}
    CHECKPOINT_FILE.write(path, metadata, tensors, overwrite=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and make sure that it is what was written.

    Raises:
        RunFolderError: when it is missing, damaged, no checkpoint, or named after another step.
    """
    metadata, tensors = CHECKPOINT_FILE.read(path)
    try:
        state = _state(metadata["state"], tensors)
    except RunFolderError as error:
        raise RunFolderError(f"checkpoint {path} cannot be read ({error})") from error
    named = NAME.fullmatch(path.name)
    if named and int(named[1]) != state["step"]:
        raise RunFolderError(f"checkpoint {path} is of step {state['step']}: it was renamed. Give it its own name back")
    return Checkpoint(state, metadata["config"], metadata["metrics"])


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read the state in a checkpoint: "step", "model", "optimizer", "homes" where experts move, and "rollouts" where
    some were waiting.

    Raises:
        RunFolderError: when it is missing, damaged, or no checkpoint.
    """
    return read_checkpoint(path).state


def _without_tensors(value: Any, place: str, tensors: dict[str, NDArray[Any]], seen: dict[tuple[Any, ...], Any]) -> Any:
    """Give the JSON of a value. Tensors are put into `tensors`, those that share memory once."""
    if isinstance(value, Tensor):
        return _reference(value, place, tensors, seen)
    if isinstance(value, Mapping):
        parts = [[key, _without_tensors(each, f"{place}/{key}", tensors, seen)] for key, each in value.items()]
        return {"dict": parts}
    if isinstance(value, list | tuple):
        items = [_without_tensors(each, f"{place}/{number}", tensors, seen) for number, each in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    assert value is None or isinstance(value, bool | int | float | str), f"{place} is a {type(value).__name__}"
    return value


def _reference(
    tensor: Tensor, place: str, tensors: dict[str, NDArray[Any]], seen: dict[tuple[Any, ...], Any]
) -> dict[str, Any]:
    memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if memory in seen and tensor.numel():
        return seen[memory]  # type: ignore[no-any-return]
    name, kind = place.removeprefix("/"), str(tensor.dtype).removeprefix("torch.")
    while name in tensors:
        name += "'"
    reference: dict[str, Any] = {"tensor": name}
    plain = tensor.detach().cpu().contiguous()
    if kind in WITHOUT_NUMPY:
        plain, reference["type"] = plain.view(WITHOUT_NUMPY[kind][1]), kind
    if plain.dim() == 0:
        plain, reference["scalar"] = plain.reshape(1), True
    tensors[name], seen[memory] = plain.numpy(), reference
    return reference


def _state(text: str, tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    left = set(tensors)
    state = _with_tensors(parse_json(text, RunFolderError, name="its state"), tensors, left, DEEPEST)
    if left:
        raise RunFolderError(f"it has tensors that are not in its state: {', '.join(sorted(left)[:3])}")
    if not isinstance(state, dict):
        raise RunFolderError(f"its state is a {type(state).__name__}")
    step, model = state.get("step"), state.get("model")
    if type(step) is not int or step < 0:
        raise RunFolderError(f"its step is {step!r:.40}; expected a number from 0")
    if not isinstance(model, dict) or not all(isinstance(weight, Tensor) for weight in model.values()):
        raise RunFolderError("it holds no weights of a model")
    return state


def _with_tensors(value: Any, tensors: Mapping[str, NDArray[Any]], left: set[str], deepest: int) -> Any:
    """Give the value of a JSON; removes from `left` the tensors that are in it."""
    if deepest == 0:
        raise RunFolderError(f"its state nests deeper than {DEEPEST}")
    if isinstance(value, list):
        return [_with_tensors(each, tensors, left, deepest - 1) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple": [*items]} if len(value) == 1:
            return tuple(_with_tensors(each, tensors, left, deepest - 1) for each in items)
        case {"dict": [*parts]} if len(value) == 1 and all(map(_is_part, parts)):
            return {key: _with_tensors(each, tensors, left, deepest - 1) for key, each in parts}
        case {"tensor": str(name)} if name in tensors and set(value) <= {"tensor", "type", "scalar"}:
            left.discard(name)
            return _tensor(name, tensors[name], value.get("type"), scalar=value.get("scalar", False))
    raise RunFolderError(f"its state has the unknown form {value!r:.60}")


def _is_part(part: Any) -> bool:
    return isinstance(part, list) and len(part) == 2 and type(part[0]) in (str, int)


def _tensor(name: str, array: NDArray[Any], kind: Any, *, scalar: Any) -> Tensor:
    tensor = torch.from_numpy(array)
    if kind is not None:
        if not isinstance(kind, str) or WITHOUT_NUMPY.get(kind, (None, None))[1] != tensor.dtype:
            raise RunFolderError(f"tensor {name} of {array.dtype} is no {kind!r:.40}")
        tensor = tensor.view(WITHOUT_NUMPY[kind][0])
    if scalar is False:
        return tensor
    if scalar is not True or tensor.shape != (1,):
        raise RunFolderError(f"tensor {name} of shape {list(array.shape)} is said to have no axes")
    return tensor.reshape(())

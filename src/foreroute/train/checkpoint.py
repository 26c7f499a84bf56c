"""Checkpoints: the state of a trainer in one sealed file, and nothing of it is executed to read it.

A safetensors file. Its tensors are those of the state, each named by its place ("optimizer/state/0/exp_avg"). Its
metadata are

    foreroute.checkpoint   "1", the version of this form
    foreroute.state        the state as JSON, with a reference in the place of each tensor
    foreroute.config       a digest of the configuration that it was trained with
    foreroute.metrics      a digest of the lines of metrics.jsonl of all steps before
    foreroute.seal         XXH3-128 over all of these, and over names, types, shapes and bytes of all tensors

In the JSON a list, a text, a number, true, false and null are themselves. An object has one of three forms:
{"tensor": name}, {"dict": [[key, value], ...]} and {"tuple": [...]}. A tensor without axes is written with one, and has
"scalar": true; one of a type that numpy lacks is written as integers of its bits, and has "type": its own.

The seal finds damage and mix-ups. It is no signature: whoever can write the file can seal it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import RunFolderError
from foreroute.files import TensorFile, parse_json, seal_file, write_atomically
from foreroute.files.container import DTYPES

VERSION = "1"
NAME = re.compile(r"step-(\d{6}|[1-9]\d{6,})\.safetensors")
"""Of a checkpoint in a run's folder, with its step."""
WRITTEN = {
    "foreroute.checkpoint",
    "foreroute.state",
    "foreroute.config",
    "foreroute.metrics",
    "foreroute.seal",
}
DEEPEST = 64
"""States nest far less; what nests deeper would end in the interpreter's stack."""
WITHOUT_NUMPY = {"bfloat16": (torch.bfloat16, torch.int16)}
"""Types of torch that numpy lacks, and what their bits are written as."""
LETTERS = {dtype: name for name, dtype in DTYPES.items()}


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
        OSError: what the system refuses; a file that was there is whole.
    """
    tensors: dict[str, NDArray[Any]] = {}
    tree = _without_tensors(checkpoint.state, "", tensors, {})
    metadata = {
        "foreroute.checkpoint": VERSION,
        "foreroute.state": json.dumps(tree),
        "foreroute.config": checkpoint.config,
        "foreroute.metrics": checkpoint.metrics,
    }
    metadata["foreroute.seal"] = seal_file(metadata, tensors)
    write_atomically(path, lambda file: _write(file, metadata, tensors))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and make sure that it is what was written.

    Raises:
        RunFolderError: when it is missing, damaged, no checkpoint, or named after another step.
    """
    try:
        with TensorFile(path, RunFolderError) as file:
            metadata = file.metadata
            if metadata.get("foreroute.checkpoint") != VERSION or set(metadata) != WRITTEN:
                raise RunFolderError(f"it is no checkpoint of form {VERSION} of foreroute train")
            tensors = {name: file.read(name) for name in file.names}
        ours = {key: value for key, value in metadata.items() if key != "foreroute.seal"}
        if seal_file(ours, tensors) != metadata["foreroute.seal"]:
            raise RunFolderError("it is damaged: its content is not what was sealed")
        state = _state(metadata["foreroute.state"], tensors)
    except RunFolderError as error:
        raise RunFolderError(f"checkpoint {path} cannot be read ({error})") from error
    named = NAME.fullmatch(path.name)
    if named and int(named[1]) != state["step"]:
        raise RunFolderError(f"checkpoint {path} is of step {state['step']}: it was renamed. Give it its own name back")
    return Checkpoint(state, metadata["foreroute.config"], metadata["foreroute.metrics"])


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


def _write(file: IO[bytes], metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write tensor by tensor, so that no second copy of all is made. The widest types first: each begins aligned."""
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": LETTERS[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(np.ascontiguousarray(tensors[name]).data)


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

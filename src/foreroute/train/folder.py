"""The folder of a run: its configuration, a line of metrics per step, checkpoints, rollouts, and the final model.

config.json                           the resolved configuration
metrics.jsonl                         one JSON object per finished step, from step 0 on
checkpoints/step-000020.safetensors   the state before step 20, with a checksum; the last few are kept
rollouts/step-000020.safetensors      the trace of step 20 and its log-probs, as `save_generation` writes
model/                                the policy after the last step, as a Hugging Face folder

What cannot be written, on a full disk for one, is a `RunFolderError`; what was there before is whole.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.capture import Generation, save_generation
from foreroute.errors import ConfigError, DivergedError, ForerouteError, RunFolderError
from foreroute.files.container import MOST_HEADER_BYTES, FileFormat
from foreroute.files.regular import as_path, parse_json, read_text
from foreroute.files.toml import by_key
from foreroute.files.writing import write_atomically
from foreroute.records import StepRecord
from foreroute.records.runs import read_steps
from foreroute.train.config import TrainConfig, parse_config

CHECKPOINT_FILE = FileFormat(
    name="checkpoint",
    version=3,
    error=RunFolderError,
    metadata=("step", "data"),
    tensors=None,
    made_by="foreroute train writes checkpoints",
    most_header_bytes=MOST_HEADER_BYTES,
)
"""Its tensors are "model/NAME", "optimizer/NUMBER/KEY" for what AdamW keeps of each parameter, and of `BESIDE`; its
metadata the next step, and the digest of the data that is trained on."""
BESIDE = ("homes", "sentinel")
"""Tensors of a checkpoint where experts move, and where a sentinel watches."""
NAME = re.compile(r"step-(\d{6}|[1-9]\d{6,})\.safetensors")
"""The name of a checkpoint in a run's folder, with its step."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Arguments of renameat2(2) on Linux, which `os` does not have."""
MAY_CHANGE = ("device", "parallel.", "checkpoint.", "rl.steps")
"""Beginnings of keys that may change on resume: how a run is executed and saved, and how long it is."""


class RunFolder:
    """A run's folder, newly made or resumed."""

    def __init__(self, path: Path) -> None:
        self.path = as_path(path, RunFolderError)

    def require_new(self, advice: str = "Use --resume to go on, or another folder") -> None:
        """Raise `RunFolderError` with this advice when the folder already holds something."""
        # a run that is killed while it writes its configuration leaves half of it behind
        if not all(path.name.startswith(".config.json.") for path in _entries(self.path)):
            raise RunFolderError(f"{self.path} is not empty; nothing was changed. {advice}")

    def begin(self, config: TrainConfig) -> None:
        """Write the configuration."""
        path = self.path / "config.json"
        with _writing(path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(config.model_dump(), indent=2, allow_nan=False))

    def require_begun(self, config: TrainConfig) -> None:
        """Make sure that a run of this configuration is there; `MAY_CHANGE` may differ."""
        path = self.path / "config.json"
        if not os.path.lexists(path):
            raise RunFolderError(f"{self.path} holds no run to resume: there is no config.json")
        stored = parse_json(read_text(path, RunFolderError), RunFolderError, name=str(path))
        try:
            parse_config(stored, source=str(path))
        except ConfigError as error:
            raise RunFolderError(f"{path} is damaged: {error}\nRestore it from a copy") from error
        old, new = by_key(stored), by_key(config.model_dump())
        gone = object()  # equal to no value: null is one
        differ = [key for key in sorted(old.keys() | new.keys()) if old.get(key, gone) != new.get(key, gone)]
        if changed := [key for key in differ if not key.startswith(MAY_CHANGE)]:
            raise RunFolderError(
                f"{self.path} was started with another configuration; these keys differ: {', '.join(changed)}. "
                "Resume with the configuration in its config.json, or start in another folder"
            )
        if (recorded := len(self.records())) > config.rl.steps:
            raise ConfigError(
                f"rl.steps = {config.rl.steps} is fewer than the {recorded} steps that {self.path} has recorded; "
                f"give {recorded} or more, or start in another folder"
            )

    def records(self) -> list[StepRecord]:
        """Read the metrics of all finished steps, from 0. Raises `RunFolderError` as `read_steps`."""
        path = self.path / "metrics.jsonl"
        return read_steps(path)[0] if os.path.lexists(path) else []

    def go_on_from(self, step: int) -> list[StepRecord]:
        """Drop the metrics of steps that run again, from `step` on, and give those before, all of them."""
        path, records = self.path / "metrics.jsonl", self.records()
        if len(records) < step:
            raise RunFolderError(
                f"{path} has the records of {len(records)} steps, and the last checkpoint is of step {step}: lines are "
                "missing. Restore the file from a copy, or start in another folder"
            )
        with _writing(path):
            # also without a torn last line, which the next step would be joined to
            write_atomically(path, "".join(map(_line, records[:step])))
        return records[:step]

    def append(self, record: StepRecord) -> None:
        """Add a line to the metrics and flush it to disk. Raises `DivergedError` when a metric is not finite."""
        flat = by_key(record.to_json())
        if wrong := [key for key, value in flat.items() if not _is_finite(value)]:
            raise DivergedError(
                f"{', '.join(wrong)} of step {record.step} {'is' if len(wrong) == 1 else 'are'} not finite; lower "
                "rl.learning_rate"
            )
        path = self.path / "metrics.jsonl"
        with _writing(path), open(path, "a", encoding="utf-8") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())  # a checkpoint that is written later may not be of steps without metrics

    def save_checkpoint(self, state: Mapping[str, Any], *, data: str, keep: int) -> Path:
        """Write the state before `state["step"]`, whole or not at all; then keep the last `keep` alone."""
        tensors: dict[str, Tensor] = {f"model/{name}": weight for name, weight in state["model"].items()}
        for number, kept in state["optimizer"]["state"].items():
            tensors |= {f"optimizer/{number}/{key}": value for key, value in kept.items()}
        tensors |= {name: state[name] for name in BESIDE if name in state}
        arrays: dict[str, NDArray[Any]] = {name: each.detach().cpu().numpy() for name, each in tensors.items()}
        folder = self.path / "checkpoints"
        path = folder / f"step-{state['step']:06d}.safetensors"
        with _writing(path):
            CHECKPOINT_FILE.write(path, {"step": str(state["step"]), "data": data}, arrays, overwrite=True)
            killed = folder.glob(".step-*")  # what writers that were killed have left
            for earlier in [*killed, *(path for _, path in files_by_step(folder)[:-keep])]:
                earlier.unlink()
        return path

    def last_checkpoint(self) -> Path | None:
        """Give the checkpoint of the highest step, or None."""
        found = files_by_step(self.path / "checkpoints")
        return found[-1][1] if found else None

    def load(self, path: Path, *, data: str) -> dict[str, Any]:
        """Read a checkpoint of this run, whose data has the digest `data`, or raise `RunFolderError`."""
        advice = "Restore it from a copy, or remove it to use the one before"
        try:
            state = load_checkpoint(path)
        except RunFolderError as error:
            raise RunFolderError(f"{error}. {advice}") from error
        # before the first update AdamW keeps nothing
        is_new = not state["optimizer"]["state"]
        if is_new and any(record.grad_norm for record in self.records()[: state["step"]]):
            raise RunFolderError(f"checkpoint {path} holds no optimizer state, and its weights were updated. {advice}")
        if state.pop("data") != data:
            raise RunFolderError(
                f"{self.path} was started with other data: task.data has changed since. Resume with the file as it "
                "was, or start in another folder"
            )
        return state

    def save_rollout(self, step: int, generation: Generation) -> None:
        """Keep a step's rollout. A step that runs again writes the same again."""
        path = self.path / "rollouts" / f"step-{step:06d}.safetensors"
        with _writing(path):
            save_generation(generation, path, overwrite=True)

    def save_model(self, write: Callable[[Path], None]) -> Path:
        """Write the final model to a folder: all of it or nothing. One that is there is replaced in one act."""
        path = self.path / "model"
        with _writing(path):
            other, before = path.with_name(".model"), path.with_name(".model-before")
            for left in (other, before):
                shutil.rmtree(left, ignore_errors=True)
            write(other)
            is_there = path.is_dir() and not path.is_symlink()
            if not (is_there and _exchanged(other, path)):
                if is_there:  # a kill after this act leaves both folders, and --resume writes the model once more
                    os.replace(path, before)
                os.replace(other, path)
            for left in (other, before):
                shutil.rmtree(left, ignore_errors=True)
        return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read the state in a checkpoint: "step", "model", "optimizer", "data", and those of `BESIDE` that it has."""
    metadata, arrays = CHECKPOINT_FILE.read(path)
    step, named = metadata["step"], NAME.fullmatch(path.name)
    if not (step.isascii() and step.isdecimal() and len(step) < 10):
        raise RunFolderError(f"checkpoint {path} is of step {step!r:.40}; expected a number from 0")
    if named and int(named[1]) != int(step):
        raise RunFolderError(f"checkpoint {path} is of step {step}: it was renamed. Give it its own name back")
    state: dict[str, Any] = {"step": int(step), "model": {}, "optimizer": {"state": {}}, "data": metadata["data"]}
    for name, array in arrays.items():
        tensor, parts = torch.from_numpy(array), name.split("/", 2)
        match parts:
            case ["model", *rest] if rest:
                state["model"]["/".join(rest)] = tensor
            case ["optimizer", number, key] if number.isdecimal() and len(number) < 10:
                state["optimizer"]["state"].setdefault(int(number), {})[key] = tensor
            case [beside] if beside in BESIDE:
                state[beside] = tensor
            case _:
                raise RunFolderError(f"checkpoint {path} has the unknown tensor {name!r:.60}")
    if not state["model"]:
        raise RunFolderError(f"checkpoint {path} holds no weights of a model")
    return state


def _is_finite(value: Any) -> bool:
    """Say whether a value of a record, and all in it, can be written as JSON, which has no NaN and no infinity."""
    if isinstance(value, Mapping | list):
        return all(map(_is_finite, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _line(record: StepRecord) -> str:
    """Give the line of metrics.jsonl of a step."""
    return json.dumps(record.to_json(), allow_nan=False) + "\n"


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one act; False on macOS and on file systems such as NFS, which cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (os.fsencode(path.absolute()) for path in (one, other))
    return exchange is not None and exchange(AT_FDCWD, next(names), AT_FDCWD, next(names), RENAME_EXCHANGE) == 0


@contextmanager
def as_run_folder_error(what: str) -> Iterator[None]:
    """Make a `RunFolderError`, which says what was loaded, of an error in loading it."""
    try:
        yield
    except ForerouteError:
        raise
    except (AttributeError, LookupError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise RunFolderError(f"{what} does not fit this model and optimizer: {error}") from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Make a `RunFolderError` of an error in writing `path`."""
    try:
        yield
    except ForerouteError as error:
        if not isinstance(error.__cause__, OSError):  # what is written was wrong, and not where it goes
            raise
        raise RunFolderError(f"{error}. Make room, then go on with --resume") from error
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path} cannot be written ({error}). What was written before is whole: make room, then go on with --resume"
        ) from error


def files_by_step(folder: Path) -> list[tuple[int, Path]]:
    """List the checkpoints, or the rollouts, in a folder by their step, the last one last."""
    return sorted((int(match[1]), path) for path in _entries(folder) if (match := NAME.fullmatch(path.name)))


def _entries(folder: Path) -> list[Path]:
    """List what is in a folder; nothing when there is none."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder} cannot be looked into ({error}); expected the folder of a run") from error

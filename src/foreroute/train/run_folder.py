"""The folder of a run: its configuration, one line of metrics per step, checkpoints, and traces.

config.json                  the resolved configuration
data.txt                     the digest of the data set, where there is one
metrics.jsonl                one JSON object per finished step
checkpoints/step-000020.pt   the state before step 20
traces/step-000020.safetensors
model/                       the policy after the last step, as a Hugging Face folder
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from foreroute.errors import ForerouteError, RunFolderError
from foreroute.files import write_atomically
from foreroute.trace import RoutingTrace, save
from foreroute.train.config import TrainConfig

CHECKPOINT = re.compile(r"step-(\d{6})\.pt")
LEFT_BEHIND = re.compile(r"\.config\.json\.[0-9a-f]{8}")
"""What a run leaves that is killed before its configuration is written."""
MAY_CHANGE = ("parallel.", "alarms.", "logging.")


class RunFolder:
    """A run's folder, newly made or taken up again.

    What cannot be written, on a full disk for one, is a `RunFolderError`; what was there before is whole.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def claim(cls, path: Path) -> RunFolder:
        """A folder for a new run; nothing is written yet.

        Raises:
            RunFolderError: when the folder already holds something.
        """
        if path.exists() and (not path.is_dir() or not all(LEFT_BEHIND.fullmatch(p.name) for p in path.iterdir())):
            raise RunFolderError(f"{path} is not empty; nothing was changed. Use --resume to go on, or another folder")
        return cls(path)

    def begin(self, config: TrainConfig) -> None:
        """Make the folder and write the configuration.

        Raises:
            RunFolderError: when something was put there since it was claimed.
        """
        RunFolder.claim(self.path)
        text = json.dumps(config.model_dump(), indent=2)
        with writing(self.path / "config.json") as path:
            write_atomically(path, text)

    def bind_data(self, digest: str) -> None:
        """Remember what a new run is trained on, or make sure that a resumed one goes on with the same.

        Args:
            digest: empty for a task that makes its problems.

        Raises:
            RunFolderError: when the data set is another.
        """
        path = self.path / "data.txt"
        if not digest:
            return
        if not path.exists():
            with writing(path):
                write_atomically(path, digest)
        elif path.read_text(encoding="utf-8") != digest:
            raise RunFolderError(
                f"{self.path} was started with other data: task.data or evaluation.data has changed since. Resume with "
                "the files as they were, or start in another folder"
            )

    @classmethod
    def reopen(cls, path: Path, config: TrainConfig) -> RunFolder:
        """Take up a run with the same configuration; only `rl.steps`, and how it is run and watched, may differ.

        Raises:
            RunFolderError: when there is no run, or its configuration is another.
        """
        try:
            stored = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{path} holds no run to resume (config.json: {error})") from error
        keys = _changed_keys(stored, config.model_dump())
        changed = {key for key in keys if key != "rl.steps" and not key.startswith(MAY_CHANGE)}
        if changed:
            raise RunFolderError(
                f"{path} was started with another configuration; these keys differ: {', '.join(sorted(changed))}. "
                "Resume with the configuration in its config.json, or start in another folder"
            )
        return cls(path)

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one line and flush it to disk."""
        with writing(self.path / "metrics.jsonl") as path, open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """The records of all finished steps; a torn last line is none."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def forget_metrics_from(self, step: int) -> None:
        """Drop the lines of steps that will run again, and a torn last line."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()[:step]
            with writing(path):
                write_atomically(path, "".join(line + "\n" for line in lines))

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> Path:
        """Write the state before `step`: the whole file or nothing."""
        with writing(self.path / "checkpoints" / f"step-{step:06d}.pt") as path:
            write_atomically(path, lambda file: torch.save({"step": step, **state}, file))
        return path

    def last_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step, or None."""
        folder = self.path / "checkpoints"
        found = [p for p in folder.iterdir() if CHECKPOINT.fullmatch(p.name)] if folder.is_dir() else []
        return max(found, default=None)

    def save_model(self, write: Callable[[Path], None]) -> Path:
        """Have the final model written to a folder: all of it or nothing. One that is there is replaced."""
        with writing(self.path / "model") as path:
            unfinished = path.with_name(".model")
            write(unfinished)
            if path.exists():
                shutil.rmtree(path)
            unfinished.rename(path)
        return path

    def checkpoint_step_before(self, step: int) -> int:
        """The step of the last checkpoint from before `step`, or of the first one."""
        steps = sorted(
            int(match[1]) for p in (self.path / "checkpoints").iterdir() if (match := CHECKPOINT.fullmatch(p.name))
        )
        return max((each for each in steps if each < step), default=steps[0])

    def save_trace(self, step: int, trace: RoutingTrace) -> None:
        """Keep the routes of a step's rollout. A step that runs again writes the same trace again."""
        with writing(self.path / "traces" / f"step-{step:06d}.safetensors") as path:
            save(trace, path, overwrite=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint without executing anything in it.

    Raises:
        RunFolderError: when it is missing or damaged.
    """
    try:
        state = torch.load(path, weights_only=True)
        if not isinstance(state, dict) or "step" not in state or "model" not in state:
            raise ValueError("it holds no step and model")
    except Exception as error:  # torch.load raises whatever its unpickler and zip reader raise
        raise RunFolderError(f"checkpoint {path} cannot be read ({error}). Remove it to use the one before") from error
    return state


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """What cannot be written is a `RunFolderError` that says so."""
    try:
        yield path
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError where the disk is full
        if isinstance(error, ForerouteError):
            raise
        raise RunFolderError(
            f"{path} cannot be written ({error}). What was written before is whole: make room, then go on with --resume"
        ) from error


def _changed_keys(stored: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> set[str]:
    changed = set()
    for key in stored.keys() | wanted.keys():
        a, b = stored.get(key), wanted.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changed |= _changed_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            changed.add(prefix + key)
    return changed


@contextmanager
def misfit_named(what: str) -> Iterator[None]:
    """What does not fit is a `RunFolderError` that says what was loaded."""
    try:
        yield
    except (KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, ForerouteError):
            raise
        raise RunFolderError(f"{what} does not fit this model and optimizer: {error}") from error

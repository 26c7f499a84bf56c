"""The folder of a run: its configuration, one line of metrics per step, checkpoints, and rollouts.

config.json                           the resolved configuration
data.txt                              the digest of the data set, where there is one
metrics.jsonl                         one JSON object per finished step
checkpoints/step-000020.safetensors   the state before step 20, with a checksum
rollouts/step-000020.safetensors      the log-probs of step 20, and beside them the trace, as `save_generation` writes
traces/step-000020.safetensors        that trace again, by another name of the same file
model/                                the policy after the last step, as a Hugging Face folder
superseded-1.jsonl                    lines of metrics of steps that ran again, and came out otherwise
.lock                                 held while a process trains here; the system lets go of it when that process ends
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from foreroute.capture import Generation, save_generation
from foreroute.capture.generation import trace_of
from foreroute.errors import ConfigError, ForerouteError, RunFolderError
from foreroute.files import blake2b_hex, parse_json, read_text, write_atomically
from foreroute.trace import save
from foreroute.train.checkpoint import NAME, Checkpoint, read_checkpoint, write_checkpoint
from foreroute.train.config import TrainConfig, parse_config
from foreroute.train.metrics_file import MetricsFile, writing

LOCK = ".lock"
LEFT_BEHIND = re.compile(r"\.lock|\.config\.json\.(foreroute|[0-9a-f]{8})")
"""What a run leaves that is killed before its configuration is written."""
MAY_CHANGE = ("device", "parallel.", "alarms.", "logging.")
"""Beginnings of keys that may change on resume, besides `rl.steps`: how a run is executed and watched."""
DIGEST = re.compile(r"[0-9a-f]{32}( [0-9a-f]{32})*")
"""Of a data set, and of the held-out one."""


class RunFolder:
    """A run's folder, newly made or taken up again.

    What cannot be written, on a full disk for one, is a `RunFolderError`; what was there before is whole.

    Args:
        path: the folder.
        config: what is trained there; reading needs none.

    Attributes:
        path: the folder.
        metrics: the records of its steps.
    """

    def __init__(self, path: Path, config: TrainConfig | None = None) -> None:
        self.path, self.metrics = path, MetricsFile(path / "metrics.jsonl")
        self._config = config

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make sure that no other process trains here meanwhile. A folder in which nothing was written is removed.

        Raises:
            RunFolderError: when one does.
        """
        existed = os.path.lexists(self.path)
        path = self.path / LOCK
        with writing(path):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = _locked(path)
        try:
            yield
        finally:
            try:
                # still locked: who waits for this file finds that it is gone, and makes another
                with suppress(OSError):
                    os.unlink(path)
                if not existed:
                    with suppress(OSError):
                        os.rmdir(self.path)
            finally:
                os.close(descriptor)

    def require_new(self, advice: str = "Use --resume to go on, or another folder") -> None:
        """Make sure that nothing is there.

        Raises:
            RunFolderError: when the folder already holds something; `advice` says what to do.
        """
        if not all(LEFT_BEHIND.fullmatch(path.name) for path in _entries(self.path)):
            raise RunFolderError(f"{self.path} is not empty; nothing was changed. {advice}")

    def begin(self) -> None:
        """Make the folder and write the configuration.

        Raises:
            RunFolderError: when something was put there meanwhile.
        """
        assert self._config is not None, "a run has a configuration"
        self.require_new()
        text = json.dumps(self._config.model_dump(), indent=2)
        path = self.path / "config.json"
        with writing(path):
            write_atomically(path, text)

    def require_begun(self) -> None:
        """Make sure that a run of this configuration is there; `rl.steps`, and how it is run and watched, may differ.

        Raises:
            RunFolderError: when there is no run, or its configuration is damaged or another.
        """
        assert self._config is not None, "a run has a configuration"
        path = self.path / "config.json"
        if not os.path.lexists(path):
            raise RunFolderError(f"{self.path} holds no run to resume: there is no config.json")
        stored = parse_json(read_text(path, RunFolderError), RunFolderError, name=str(path))
        try:
            parse_config(stored, source=str(path))
        except ConfigError as error:
            raise RunFolderError(f"{path} is damaged: {error}\nRestore it from a copy") from error
        old, new = by_key(stored), by_key(self._config.model_dump())
        differ = [
            key for key in sorted(old.keys() | new.keys()) if (key in old, old.get(key)) != (key in new, new.get(key))
        ]
        if changed := [key for key in differ if not _may_change(key)]:
            raise RunFolderError(
                f"{self.path} was started with another configuration; these keys differ: {', '.join(changed)}. "
                "Resume with the configuration in its config.json, or start in another folder"
            )

    def bind_data(self, digest: str, *, begun: bool) -> None:
        """Remember what a new run is trained on, or make sure that a resumed one goes on with the same.

        Args:
            digest: empty for a task that makes its problems.
            begun: whether the run has a checkpoint.

        Raises:
            RunFolderError: when the data set is another, or what was remembered is gone or damaged.
        """
        path = self.path / "data.txt"
        if not digest:
            return
        if not os.path.lexists(path):
            if begun:
                raise RunFolderError(f"{path} does not exist: the data of the run is not known. Restore it from a copy")
            with writing(path):
                write_atomically(path, digest)
            return
        stored = read_text(path, RunFolderError)
        if not DIGEST.fullmatch(stored) or len(stored) != len(digest):
            raise RunFolderError(f"{path} is damaged: it holds {stored!r:.60}, no digest. Restore it from a copy")
        if stored != digest:
            raise RunFolderError(
                f"{self.path} was started with other data: task.data or evaluation.data has changed since, or "
                "data.txt is damaged. Resume with the files as they were, or start in another folder"
            )

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> Path:
        """Write the state before `step`: the whole file or nothing."""
        checkpoint = Checkpoint({"step": step, **state}, config_digest(self._config), self.metrics.digest(step))
        path = self.path / "checkpoints" / f"step-{step:06d}.safetensors"
        with writing(path):
            write_checkpoint(path, checkpoint)
        return path

    def last_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step, or None."""
        found = ((path, NAME.fullmatch(path.name)) for path in _entries(self.path / "checkpoints"))
        return max(((int(match[1]), path) for path, match in found if match), default=(0, None))[1]

    def load(self, path: Path) -> Checkpoint:
        """Read a checkpoint of this run.

        Raises:
            RunFolderError: when it is missing or damaged, or of another run.
        """
        try:
            checkpoint = read_checkpoint(path)
        except RunFolderError as error:
            raise RunFolderError(f"{error}. Restore it from a copy, or remove it to use the one before") from error
        if checkpoint.config != config_digest(self._config):
            raise RunFolderError(
                f"checkpoint {path} was saved by a run of another configuration. Remove it to use the one before"
            )
        return checkpoint

    def save_model(self, write: Callable[[Path], None]) -> Path:
        """Write the final model to a folder: all of it or nothing. One that is there is replaced."""
        path = self.path / "model"
        with writing(path):
            unfinished, replaced = path.with_name(".model"), path.with_name(".model.replaced")
            for leftover in (unfinished, replaced):
                _remove(leftover)
            write(unfinished)
            _sync(unfinished)
            if os.path.lexists(path):
                os.replace(path, replaced)
            os.replace(unfinished, path)
            _remove(replaced)
        return path

    def save_rollout(self, step: int, generation: Generation) -> None:
        """Keep a step's rollout, and its trace among those of the run. A step that runs again writes the same again."""
        rollout = self.path / "rollouts" / f"step-{step:06d}.safetensors"
        with writing(rollout):
            save_generation(generation, rollout, overwrite=True)
        trace = self.path / "traces" / rollout.name
        with writing(trace):
            trace.parent.mkdir(parents=True, exist_ok=True)
            trace.unlink(missing_ok=True)
            try:
                os.link(trace_of(rollout), trace)
            except OSError:  # a file system without links
                save(generation.trace, trace, encoding="ordered", overwrite=True)


def config_digest(config: TrainConfig | None) -> str:
    """Compute `blake2b_hex` of all keys that may not change from one start of a run to the next.

    Empty without a configuration.
    """
    if config is None:
        return ""
    fixed = {key: value for key, value in by_key(config.model_dump()).items() if not _may_change(key)}
    return blake2b_hex(json.dumps(fixed, sort_keys=True).encode())


def by_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten tables within tables: their values by their whole key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= by_key(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


@contextmanager
def misfit_named(what: str) -> Iterator[None]:
    """Make a `RunFolderError`, which says what was loaded, of an error in loading it."""
    try:
        yield
    except ForerouteError:
        raise
    except (AttributeError, LookupError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise RunFolderError(f"{what} does not fit this model and optimizer: {error}") from error


def _may_change(key: str) -> bool:
    return key == "rl.steps" or key.startswith(MAY_CHANGE)


def _entries(folder: Path) -> list[Path]:
    """List what is in a folder; nothing when there is none."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder} cannot be looked into ({error}); expected the folder of a run") from error


def _locked(path: Path) -> int:
    """Lock a file, and make sure that it is still named `path`; returns its descriptor."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise RunFolderError(
                f"{path.parent} is already in use: another process trains in it. Wait for it to end, "
                "or use another folder"
            ) from error
        except OSError:  # a file system without locks
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # who held it has removed it meanwhile


def _remove(path: Path) -> None:
    """Remove a folder, or whatever else has its name; a link, and not what it points at."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _sync(folder: Path) -> None:
    """Make all files of a folder survive a power cut."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

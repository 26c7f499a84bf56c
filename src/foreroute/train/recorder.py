"""What is written down about finished steps: traces, metrics with the alarms that are on, TensorBoard, and W&B."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foreroute.errors import CollapseError, ConfigError, RunFolderError, how_to_install
from foreroute.files import read_text, write_atomically
from foreroute.mismatch import Alarm, Signals, alarms
from foreroute.train.config import LoggingConfig, TrainConfig
from foreroute.train.metrics_file import writing
from foreroute.train.rollout import Experience
from foreroute.train.run_folder import RunFolder

IDENTITY = re.compile(r"[0-9a-f]{12}")


class Recorder:
    """Writes down the steps of one run. Made on all ranks; rank 0 opens it and writes."""

    def __init__(self, config: TrainConfig, run: RunFolder) -> None:
        self._config, self._run = config, run
        self._history: list[Signals] = []
        self._loggers: list[TensorBoard | WeightsAndBiases] = []

    def open(self, first_step: int) -> None:
        """Open the loggers, and read what alarms look at of the steps before `first_step`, which is the next."""
        self._history = [Signals.of(record) for record in self._run.metrics.records()[:first_step]]
        self._loggers = open_loggers(self._config, self._run, first_step)

    def write(self, experience: Experience, record: dict[str, Any]) -> Path | None:
        """Write everything about one step. Adds the alarms that are on to the record.

        Returns:
            The file that earlier lines of this step and later ones were put into, if it came out otherwise than then.
        """
        step = record["step"]
        self._history.append(Signals.of(record))
        record["alarms"] = [asdict(alarm) for alarm in alarms(self._history)]
        if step % self._config.measure.save_trace_every == 0:
            self._run.save_rollout(step, experience.generation)
        there, aside = self._run.metrics.append(record)
        for logger in self._loggers:
            logger.log(step, scalars(there))
        return aside

    def stop_if_told(self, record: Mapping[str, Any]) -> None:
        """End the run where the configuration says so about alarms that are on.

        Raises:
            CollapseError: with the alarms. The step is recorded, and no checkpoint is saved after it.
        """
        settings = self._config.alarms
        found = [Alarm(**alarm) for alarm in record["alarms"] if alarm["kind"] in settings.act_on]
        if found and settings.action == "stop":
            raise CollapseError(
                f"step {record['step']}: {'; '.join(map(str, found))}. The run was ended by "
                f'alarms.action = "stop"; its last checkpoint is {self._run.last_checkpoint()}. Resume with "warn" to '
                "go on as it is"
            )

    def close(self) -> None:
        """End the loggers."""
        for logger in self._loggers:
            logger.close()


def require_loggers(config: LoggingConfig) -> None:
    """Refuse loggers that are not installed.

    Raises:
        ConfigError: naming the key and the package.
    """
    for package in ("tensorboard", "wandb"):
        if getattr(config, package) and find_spec(package) is None:
            raise ConfigError(
                f"logging.{package} = true needs the package {package}, which is not installed: "
                f"{how_to_install(package)}, or set it to false"
            )


def open_loggers(config: TrainConfig, run: RunFolder, first_step: int) -> list[TensorBoard | WeightsAndBiases]:
    """Open the loggers that the configuration asks for; what they have of steps from `first_step` on runs again."""
    tensorboard = [TensorBoard(run, first_step)] if config.logging.tensorboard else []
    return tensorboard + ([WeightsAndBiases(config, run)] if config.logging.wandb else [])


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Pick the single numbers of a record by path, such as "mismatch/native/f2".

    How many alarms are on, and live agreement by mini-batch, are among them. Histograms and other lists stay in
    metrics.jsonl.
    """
    values = dict(_numbers(record))
    del values["step"]
    values |= {f"live_agreement/{number}": share for number, share in enumerate(record.get("live_agreement", []))}
    values["alarms"] = len(record["alarms"])
    return values


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + key, value


class TensorBoard:
    """Writes event files; readers drop what an earlier file has of steps from `first_step` on."""

    def __init__(self, run: RunFolder, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run.path / "tensorboard"
        with writing(self._folder):
            self._writer = SummaryWriter(str(self._folder), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers; they are on disk when this returns."""
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to a run at Weights & Biases. A continued run does not take steps that it has."""

    def __init__(self, config: TrainConfig, run: RunFolder) -> None:
        import wandb

        self._run = wandb.init(
            project=config.logging.wandb_project,
            mode=config.logging.wandb_mode,
            name=config.name,
            id=_identity(run),
            resume="allow",
            dir=str(run.path),
            config=config.model_dump(),
        )
        # what a killed run logged after its checkpoint runs again with the same numbers
        self._first_new = int(self._run.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step, unless it is there."""
        if step >= self._first_new:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _identity(run: RunFolder) -> str:
    """Give the id of the run at Weights & Biases, made when it is first asked for."""
    path = run.path / "wandb-id"
    if not os.path.lexists(path):
        with writing(path):
            write_atomically(path, secrets.token_hex(6))
    identity = read_text(path, RunFolderError)
    if not IDENTITY.fullmatch(identity):
        raise RunFolderError(f"{path} is damaged: it holds {identity!r:.40}. Remove it to begin another run there")
    return identity

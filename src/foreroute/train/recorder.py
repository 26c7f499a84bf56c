"""What is written down about finished steps: traces, metrics with the alarms that are on, TensorBoard, and W&B."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foreroute.errors import ConfigError, RunFolderError, how_to_install
from foreroute.files import read_text, write_atomically
from foreroute.train.alarm_actions import AlarmActions, read_rollbacks
from foreroute.train.config import LoggingConfig, TrainConfig
from foreroute.train.metrics_file import writing
from foreroute.train.rollout import Experience
from foreroute.train.run_folder import RunFolder


class Recorder:
    """Writes down the steps of one run, on rank 0.

    Args:
        config: of the run.
        run: its folder.
        alarm_actions: what adds the alarms.
    """

    def __init__(self, config: TrainConfig, run: RunFolder, alarm_actions: AlarmActions) -> None:
        self._config, self._run, self._alarm_actions = config, run, alarm_actions
        self._loggers: list[TensorBoard | WeightsAndBiases] = []

    def open(self, first_step: int) -> None:
        """Open the loggers; `first_step` is the next."""
        self._loggers = open_loggers(self._config, self._run, first_step)

    def write(self, experience: Experience, record: dict[str, Any]) -> Path | None:
        """Write everything about one step. Adds the alarms to the record.

        Returns:
            Where what was recorded of this step and of later ones was put, if it was something else.
        """
        self._alarm_actions.examine(record)
        step = record["step"]
        aside = self._run.supersede(record)
        if step % self._config.measure.save_trace_every == 0:
            generation = experience.generation
            self._run.save_rollout(step, replace(generation, trace=generation.trace.without_gate_weights()))
        there = self._run.metrics.append(record)
        for logger in self._loggers:
            logger.log(step, scalars(there))
        return aside

    def close(self) -> None:
        """End the loggers."""
        for logger in self._loggers:
            logger.close()


IDENTITY = re.compile(r"[0-9a-f]{12}")


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
    """Open the loggers that the configuration asks for.

    Args:
        config: of the run.
        run: its folder.
        first_step: the next step; what was logged of it and of later ones, before a kill or a rollback, is superseded.
    """
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

        identity, attempt = _identity(run), len(read_rollbacks(run))
        self._run = wandb.init(
            project=config.logging.wandb_project,
            mode=config.logging.wandb_mode,
            name=f"{config.name}-{attempt}" if attempt else config.name,
            group=identity,
            id=f"{identity}-{attempt}",
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
        made = secrets.token_hex(6)
        with writing(path):
            write_atomically(path, made)
    identity = read_text(path, RunFolderError)
    if not IDENTITY.fullmatch(identity):
        raise RunFolderError(f"{path} is damaged: it holds {identity!r:.40}. Remove it to begin another run there")
    return identity

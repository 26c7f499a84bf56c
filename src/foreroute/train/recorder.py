"""What is written down about finished steps: traces, metrics with the alarms that are on, and loggers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from foreroute.train.config import TrainConfig
from foreroute.train.guard import Guard
from foreroute.train.loggers import Logger, open_loggers, scalars
from foreroute.train.rollout import Experience
from foreroute.train.run_folder import RunFolder


class Recorder:
    """Of one run, for rank 0.

    Args:
        config: of the run.
        run: its folder.
        guard: who adds the alarms.
    """

    def __init__(self, config: TrainConfig, run: RunFolder, guard: Guard) -> None:
        self._config, self._run, self._guard = config, run, guard
        self._loggers: list[Logger] = []

    def open(self, first_step: int) -> None:
        """Open the loggers; `first_step` is the next."""
        self._loggers = open_loggers(self._config, self._run, first_step)

    def write(self, step: int, experience: Experience, record: dict[str, Any]) -> Path | None:
        """Everything about one step. Adds the alarms to the record.

        Returns:
            Where what was recorded of this step and of later ones was put, if it was something else.
        """
        self._guard.examine(record)
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

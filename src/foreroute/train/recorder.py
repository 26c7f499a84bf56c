"""What is written down about finished steps: traces, metrics with the alarms that are on, and loggers."""

from __future__ import annotations

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

    def write(self, step: int, experience: Experience, record: dict[str, Any]) -> None:
        """Everything about one step. Adds the alarms to the record."""
        if step % self._config.measure.save_trace_every == 0:
            self._run.save_trace(step, experience.generation.trace.without_gate_weights())
        self._guard.examine(record)
        self._run.append_metrics(record)
        for logger in self._loggers:
            logger.log(step, scalars(record))

    def close(self) -> None:
        """End the loggers."""
        for logger in self._loggers:
            logger.close()

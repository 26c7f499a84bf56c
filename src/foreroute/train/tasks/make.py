"""The task that a configuration asks for."""

from __future__ import annotations

from foreroute.train.config import TrainConfig
from foreroute.train.tasks.chain import ChainTask
from foreroute.train.tasks.task import Task


def make_task(config: TrainConfig) -> Task:
    """Make it; the caller closes it."""
    return ChainTask(config.task)

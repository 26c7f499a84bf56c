"""What the trainer trains on: problems, their tokens, and the rewards of responses. A file for each kind of task."""

from __future__ import annotations

from pathlib import Path

from foreroute.adapters.hf import Tokenizer
from foreroute.train.config import TrainConfig
from foreroute.train.tasks.chain import ChainTask
from foreroute.train.tasks.dataset import DatasetTask
from foreroute.train.tasks.task import Demonstration, Problem, Task

__all__ = ["Demonstration", "Problem", "Task", "make_task"]


def make_task(config: TrainConfig) -> Task:
    """Make the task that a configuration asks for; the caller closes it.

    Raises:
        ConfigError: when there is no tokenizer, or no reward.
        DatasetError: when a line of the data set is not what it must be.
    """
    if config.task.kind == "chain":
        return ChainTask(config.task)
    return DatasetTask(config, Tokenizer(Path(str(config.model.tokenizer_folder))))

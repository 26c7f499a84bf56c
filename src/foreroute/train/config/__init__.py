"""The configuration of a run: a file for each table, and `run.py` for the whole."""

from foreroute.train.config.alarms import AlarmsConfig
from foreroute.train.config.evaluation import EvaluationConfig
from foreroute.train.config.logging import LoggingConfig
from foreroute.train.config.model import LoRAConfig, ModelConfig, WarmStartConfig
from foreroute.train.config.parallel import ParallelConfig
from foreroute.train.config.rl import RLConfig
from foreroute.train.config.rollout import RolloutConfig, VLLMConfig
from foreroute.train.config.run import CheckpointConfig, MeasureConfig, TrainConfig, load_config, parse_config
from foreroute.train.config.task import TaskConfig

__all__ = [
    "AlarmsConfig",
    "CheckpointConfig",
    "EvaluationConfig",
    "LoRAConfig",
    "LoggingConfig",
    "MeasureConfig",
    "ModelConfig",
    "ParallelConfig",
    "RLConfig",
    "RolloutConfig",
    "TaskConfig",
    "TrainConfig",
    "VLLMConfig",
    "WarmStartConfig",
    "load_config",
    "parse_config",
]

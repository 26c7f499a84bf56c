"""The configuration of a run: a file for each table, and `run.py` for the whole."""

from foreroute.train.config.model import LoRAConfig, ModelConfig, WarmStartConfig
from foreroute.train.config.monitoring import AlarmsConfig, CheckpointConfig, LoggingConfig, MeasureConfig
from foreroute.train.config.rl import RLConfig
from foreroute.train.config.rollout import EvaluationConfig, RolloutConfig, VLLMConfig
from foreroute.train.config.run import ParallelConfig, TrainConfig, load_config, parse_config
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

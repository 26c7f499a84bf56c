"""The configuration of a run: `learned.py` what is trained, `rl.py` how, and `run.py` the whole."""

from foreroute.train.config.learned import EvaluationConfig, ModelConfig, RolloutConfig, TaskConfig, WarmStartConfig
from foreroute.train.config.rl import RLConfig
from foreroute.train.config.run import LoggingConfig, ParallelConfig, TrainConfig, load_config, parse_config

__all__ = [
    "EvaluationConfig",
    "LoggingConfig",
    "ModelConfig",
    "ParallelConfig",
    "RLConfig",
    "RolloutConfig",
    "TaskConfig",
    "TrainConfig",
    "WarmStartConfig",
    "load_config",
    "parse_config",
]

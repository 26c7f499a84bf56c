"""The reference trainer, meant to be read: start with `loop.py`, a step; `run.py` is the run around it."""

from foreroute.train.checkpoint import load_checkpoint
from foreroute.train.config import TrainConfig, load_config, parse_config
from foreroute.train.run import Watcher, train
from foreroute.train.run_folder import RunFolder

__all__ = ["RunFolder", "TrainConfig", "Watcher", "load_checkpoint", "load_config", "parse_config", "train"]

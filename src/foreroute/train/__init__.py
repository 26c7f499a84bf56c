"""The reference loop, meant to be read: start with `loop.py`, one step of RL; `run.py` is the run around it."""

from foreroute.train.config import TrainConfig, load_config, parse_config
from foreroute.train.folder import RunFolder, load_checkpoint
from foreroute.train.run import Watcher, train

__all__ = ["RunFolder", "TrainConfig", "Watcher", "load_checkpoint", "load_config", "parse_config", "train"]

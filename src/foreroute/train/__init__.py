"""The reference trainer, meant to be read: start with `loop.py`."""

from foreroute.train.config import TrainConfig, load_config, parse_config
from foreroute.train.loop import Watcher, train
from foreroute.train.run_folder import RunFolder, load_checkpoint

__all__ = ["RunFolder", "TrainConfig", "Watcher", "load_checkpoint", "load_config", "parse_config", "train"]

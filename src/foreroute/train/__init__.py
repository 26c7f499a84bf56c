"""The reference loop, meant to be read: start with `loop.py`, one step of RL; `run.py` is the run around it."""

from foreroute.train.config import TrainConfig, load_config, parse_config
from foreroute.train.folder import RunFolder
from foreroute.train.run import train

__all__ = ["RunFolder", "TrainConfig", "load_config", "parse_config", "train"]

"""Worth of a plan on a cluster that is described, not there: a model of one RL step, in seconds. No torch."""

from foreroute.simulate.config import SimulateConfig, load_config, parse_config
from foreroute.simulate.records import MethodRecord, SimulatedMethod, SimulationRecord
from foreroute.simulate.simulation import simulate

__all__ = [
    "MethodRecord",
    "SimulateConfig",
    "SimulatedMethod",
    "SimulationRecord",
    "load_config",
    "parse_config",
    "simulate",
]

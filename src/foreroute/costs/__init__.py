"""Seconds and memory of a step: the one cost model of planner, balancers and simulator, with presets. No torch."""

from foreroute.costs.memory import BatchSizes, MemoryForecast, StepMemory
from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset

__all__ = ["BatchSizes", "CostModel", "MemoryForecast", "StepMemory", "hardware_preset", "model_preset"]

"""Sensitivities: the same simulation with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from foreroute.errors import ConfigError
from foreroute.simulate.config import SimulateConfig, SweepConfig, parse_config
from foreroute.simulate.records import SimulationRecord
from foreroute.simulate.simulation import OnProgress, simulate

PLACES = {
    "redundant_slots": "cluster",
    "expert_parallel": "cluster",
    "tokens_per_rank": "workload",
    "skew": "workload",
    "overlap": "execution",
    "planning_s": "execution",
}
BANDWIDTHS = {
    "node_bandwidth": "node_bytes_per_s",
    "cluster_bandwidth": "cluster_bytes_per_s",
    "host_bandwidth": "host_bytes_per_s",
}


@dataclass(frozen=True)
class SweepRecord:
    """One point of a sweep.

    Attributes:
        key: what was changed, a field of `SweepConfig`.
        value: to what; bandwidths are factors.
        simulation: the record.
    """

    key: str
    value: float
    simulation: SimulationRecord

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"simulation": self.simulation.as_dict()}


def sweep(config: SimulateConfig, *, on_progress: OnProgress | None = None) -> Iterator[SweepRecord]:
    """Simulate every value of every key of `config.sweep`, one at a time; all else as configured.

    Raises:
        ConfigError, TopologyError, CountsError: when a value makes a configuration of what cannot be.
    """
    for key in SweepConfig.model_fields:
        for value in getattr(config.sweep, key):
            yield SweepRecord(key, value, simulate(varied(config, key, value), on_progress=on_progress))


def varied(config: SimulateConfig, key: str, value: float) -> SimulateConfig:
    """The configuration with one thing changed.

    Args:
        config: to change.
        key: a field of `SweepConfig`.
        value: a factor of the configured bandwidth for those named so, else the value itself.

    Raises:
        ConfigError, TopologyError: when the key is unknown, or the configuration then describes what cannot be.
    """
    values = config.model_dump()
    if key in BANDWIDTHS:
        name = BANDWIDTHS[key]
        values["links"] = values["links"] | {name: getattr(config.described().topology.links, name) * value}
    elif key in PLACES:
        values[PLACES[key]] = values[PLACES[key]] | {key: value}
    else:
        raise ConfigError(f"there is no sweep over {key}; expected one of {', '.join(SweepConfig.model_fields)}")
    return parse_config(values, source=f"the configuration with {key} = {value}")

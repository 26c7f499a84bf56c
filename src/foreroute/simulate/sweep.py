"""Sensitivities: the same simulation with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from foreroute.simulate.config import SimulateConfig, SweepConfig
from foreroute.simulate.reading import varied
from foreroute.simulate.records import SimulationRecord
from foreroute.simulate.simulation import OnProgress, simulate


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

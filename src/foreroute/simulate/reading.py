"""A configuration from a file, checked whole: every key, its size, and every point of its sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foreroute.errors import ConfigError
from foreroute.files.config_file import checked, read_toml
from foreroute.simulate.config import SimulateConfig, SweepConfig
from foreroute.simulate.size import MOST_WORK, Size
from foreroute.simulate.steps import drawn_size

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
MOST_POINTS = 256
"""Of a sweep."""


def load_config(path: Path) -> SimulateConfig:
    """Read a TOML file.

    Raises:
        ConfigError: naming every unknown key (with the nearest known one), wrong type and conflict; or what would take
            more memory or work than a simulation may.
        TopologyError: when ranks do not fill nodes.
    """
    return parse_config(read_toml(path), source=str(path))


def parse_config(values: dict[str, Any], *, source: str) -> SimulateConfig:
    """Check values that came from `source`.

    Raises:
        ConfigError, TopologyError: as `load_config`.
    """
    config = checked(SimulateConfig, values, source=source)
    points = [(key, value) for key in SweepConfig.model_fields for value in getattr(config.sweep, key)]
    if len(points) > MOST_POINTS:
        raise ConfigError(f"{source}: the sweep has {len(points)} points; expected {MOST_POINTS} at most")
    sizes = [_size(config, source)]
    sizes += [_size(varied(config, key, value), f"{source}: {key} = {value}") for key, value in points]
    drawn = [size for size in sizes if size is not None]
    work = sum(size.work for size in drawn) * len(config.methods)
    if work > MOST_WORK:
        cells = sum(size.groups * size.cells for size in drawn)
        raise ConfigError(
            f"{source} would plan {cells:,} cells with {len(config.methods)} methods, {work:,} entries of assignments; "
            f"expected {MOST_WORK:,.0f} at most. Draw fewer groups, layers or micro-steps, or take fewer methods or "
            "points of the sweep"
        )
    return config


def varied(config: SimulateConfig, key: str, value: float) -> SimulateConfig:
    """The configuration with one thing changed, and no sweep.

    Args:
        config: to change.
        key: a field of `SweepConfig`.
        value: a factor of the configured bandwidth for those named so, else the value itself.

    Raises:
        ConfigError, TopologyError: when the key is unknown, or the configuration then describes what cannot be.
    """
    values = config.model_dump() | {"sweep": {}}
    if key in BANDWIDTHS:
        name = BANDWIDTHS[key]
        values["links"] = values["links"] | {name: getattr(config.described().topology.links, name) * value}
    elif key in PLACES:
        values[PLACES[key]] = values[PLACES[key]] | {key: value}
    else:
        raise ConfigError(f"there is no sweep over {key}; expected one of {', '.join(SweepConfig.model_fields)}")
    return parse_config(values, source=f"the configuration with {key} = {value}")


def _size(config: SimulateConfig, source: str) -> Size | None:
    """Of what is drawn; None where counts are read from a file, which says how many there are."""
    cluster = config.described(source)
    if config.workload.counts is not None:
        return None
    try:
        size = drawn_size(config, cluster.topology, cluster.costs.model)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    size.require(source)
    return size

"""A cluster, a model and what may be assumed of them, as a TOML file; docs/planner.md shows one.

Keys are the attributes of `Topology`, `Hardware`, `Links`, `ModelShape` and `CostModel`. What a preset says can be
overridden key by key; without a preset every key is needed that has no default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import create_model

from foreroute.costs.model import CostModel, Hardware, ModelShape
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.errors import ConfigError
from foreroute.files.config_file import Section, checked, invalid, read_toml, unknown_key
from foreroute.plan.topology import Links, Topology

WHAT = "topology file"
Made = TypeVar("Made", Hardware, Links, ModelShape)


@dataclass(frozen=True)
class Cluster:
    """What a file describes."""

    topology: Topology
    costs: CostModel


def load_cluster(path: Path) -> Cluster:
    """Read a topology file.

    Raises:
        ConfigError: naming every unknown key (with the nearest known one), wrong type and missing value.
        TopologyError: when the ranks do not fill nodes.
    """
    return parse_cluster(read_toml(path), source=str(path))


def parse_cluster(values: dict[str, Any], *, source: str) -> Cluster:
    """Check values that came from `source`.

    Raises:
        ConfigError, TopologyError: as `load_cluster`.
    """
    given: dict[str, dict[str, Any]] = {name: _given(values.get(name, {}), name, source) for name in TABLES}
    if unknown := [unknown_key(name, name, list(TABLES)) for name in values if name not in TABLES]:
        raise ConfigError(invalid(source, WHAT, unknown))
    hardware_name, model_name = given["hardware"].pop("preset", None), given["model"].pop("preset", None)
    like = None if hardware_name is None else hardware_preset(hardware_name)
    links = _made(Links, None if like is None else like.links, given["links"], f"{source}: [links]")
    hardware = _made(Hardware, like, {**given["hardware"], "links": links}, f"{source}: [hardware]")
    known = None if model_name is None else model_preset(model_name)
    model = _made(ModelShape, known, given["model"], f"{source}: [model]")
    place: dict[str, Any] = {
        "ranks_per_node": min(given["topology"]["num_ranks"], hardware.ranks_per_node),
        **given["topology"],
    }
    return Cluster(Topology(links=links, **place), CostModel(model=model, hardware=hardware, **given["costs"]))


def cluster_toml(cluster: Cluster) -> str:
    """The content of a file that describes this cluster, every key given."""
    costs, topology = cluster.costs, cluster.topology
    tables = {
        "topology": vars(topology),
        "hardware": vars(costs.hardware),
        "links": vars(topology.links),
        "model": vars(costs.model),
        "costs": vars(costs),
    }
    lines = []
    for name, values in tables.items():
        # numbers and words in JSON are those of TOML; nested tables stand beside
        pairs = [f"{key} = {json.dumps(v)}" for key, v in values.items() if isinstance(v, int | float | str)]
        lines += [f"[{name}]", *pairs, ""]
    return "\n".join(lines)


def _made(kind: type[Made], preset: Made | None, values: Mapping[str, Any], what: str) -> Made:
    if preset is not None:
        return replace(preset, **values)
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in values]
    if missing:
        raise ConfigError(f"{what} has no {', '.join(missing)}; give them, or a preset")
    return kind(**values)


def _table(kind: type, *, required: tuple[str, ...] = (), without: tuple[str, ...] = (), preset: bool) -> type[Section]:
    """A table whose keys are the fields of a dataclass; the dataclass itself checks their values."""
    keys: dict[str, Any] = {name: (hint, None) for name, hint in get_type_hints(kind).items() if name not in without}
    keys |= {name: (keys[name][0], ...) for name in required}
    keys |= {"preset": (str, None)} if preset else {}
    return create_model(kind.__name__, __base__=Section, **keys)


TABLES = {
    "topology": _table(Topology, required=("num_ranks", "redundant_slots"), without=("links",), preset=False),
    "hardware": _table(Hardware, without=("links",), preset=True),
    "links": _table(Links, preset=False),
    "model": _table(ModelShape, preset=True),
    "costs": _table(CostModel, without=("model", "hardware"), preset=False),
}


def _given(values: Any, name: str, source: str) -> dict[str, Any]:
    """The keys that were given."""
    table = checked(TABLES[name], values, source=source, what=WHAT, within=name)
    return table.model_dump(exclude_unset=True)

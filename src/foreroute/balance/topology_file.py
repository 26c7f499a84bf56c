"""A cluster, a model and what may be assumed of them, as a TOML file.

    [topology]
    num_ranks = 64
    redundant_slots = 2

    [hardware]
    preset = "h100"

    [links]
    cluster_bytes_per_s = 22.5e9    # this cluster has one NIC for two ranks

    [model]
    preset = "qwen3-30b-a3b"

    [costs]
    dispatcher = "dedup"

Keys are the attributes of `Topology`, `Hardware`, `Links`, `ModelShape` and `CostModel`. What a preset says can be
overridden key by key; without a preset every key is needed that has no default.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from foreroute.balance.costs import CostModel, Hardware, ModelShape
from foreroute.balance.presets import hardware_preset, model_preset
from foreroute.balance.topology import Links, Topology
from foreroute.errors import ConfigError

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
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not a readable TOML file: {error}") from error
    return parse_cluster(values, source=str(path))


def parse_cluster(values: dict[str, Any], *, source: str) -> Cluster:
    """Check values that came from `source`.

    Raises:
        ConfigError, TopologyError: as `load_cluster`.
    """
    given: dict[str, dict[str, Any]] = {name: _checked(values.get(name, {}), name, source) for name in TABLES}
    unknown = [f"  {_unknown(name, list(TABLES))}" for name in values if name not in TABLES]
    if unknown:
        raise ConfigError(f"{source} is not a valid topology file:\n" + "\n".join(unknown))
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


def _made(kind: type[Made], preset: Made | None, values: Mapping[str, Any], what: str) -> Made:
    if preset is not None:
        return replace(preset, **values)
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in values]
    if missing:
        raise ConfigError(f"{what} has no {', '.join(missing)}; give them, or a preset")
    return kind(**values)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _table(kind: type, *, required: tuple[str, ...] = (), without: tuple[str, ...] = (), preset: bool) -> type[_Table]:
    """A table whose keys are the fields of a dataclass; the dataclass itself checks their values."""
    keys: dict[str, Any] = {name: (hint, None) for name, hint in get_type_hints(kind).items() if name not in without}
    keys |= {name: (keys[name][0], ...) for name in required}
    keys |= {"preset": (str, None)} if preset else {}
    return create_model(kind.__name__, __base__=_Table, **keys)


TABLES = {
    "topology": _table(Topology, required=("num_ranks", "redundant_slots"), without=("links",), preset=False),
    "hardware": _table(Hardware, without=("links",), preset=True),
    "links": _table(Links, preset=False),
    "model": _table(ModelShape, preset=True),
    "costs": _table(CostModel, without=("model", "hardware"), preset=False),
}


def _checked(values: Any, name: str, source: str) -> dict[str, Any]:
    """The keys that were given."""
    table = TABLES[name]
    try:
        return table.model_validate(values).model_dump(exclude_unset=True)
    except ValidationError as error:
        problems = "\n".join(f"  {_describe(problem, name, list(table.model_fields))}" for problem in error.errors())
        raise ConfigError(f"{source} is not a valid topology file:\n{problems}") from error


def _describe(problem: Any, table: str, known: list[str]) -> str:
    key = ".".join([table, *map(str, problem["loc"])])
    if problem["type"] == "extra_forbidden":
        return _unknown(str(problem["loc"][-1]), known, f"{table}.")
    if problem["type"] == "missing":
        return f"{key}: required and not given"
    return f"{key}: {problem['msg']} (got {problem['input']!r})"


def _unknown(key: str, known: list[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"{prefix}{key}: unknown key; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")

"""A cluster, a model and what may be assumed of them, as a TOML file; docs/planner.md shows one.

Keys are the attributes of `Topology`, `Hardware`, `Links`, `ModelShape` and `CostModel`. What a preset says can be
overridden key by key; without a preset every key is needed that has no default.
"""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from foreroute.checks import is_whole
from foreroute.costs.model import CostModel, Hardware, ModelShape
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.errors import ConfigError, TopologyError, shown
from foreroute.files.regular import read_text
from foreroute.files.toml import MOST_BYTES, read_toml, refuse_impossible, unknown_key
from foreroute.files.writing import write_atomically, writing_named
from foreroute.plan.topology import Links, Topology

TABLES = {"topology": Topology, "hardware": Hardware, "links": Links, "model": ModelShape, "costs": CostModel}
"""Class that each table describes. Attributes that are tables of this file stand beside it."""
PRESETS = {"hardware": hardware_preset, "model": model_preset}
NODE_LINK, CLUSTER_LINK = "node_bytes_per_s", "cluster_bytes_per_s"
GPU_SECONDS = {
    "links": ("node_latency_s", "cluster_latency_s"),
    "hardware": ("layer_s", "replica_s", "replica_backward_s"),
}
"""Keys by table that hold microseconds to a few milliseconds on GPUs, over slow Ethernet too."""
MOST_GPU_S = 0.015
"""Their most seconds: 20 µs written in milliseconds are more. Processes on few cores of a CPU may take longer."""
GPU_RATES = {
    "hardware": {
        "gemm_flops_per_s": (1e12, 1e16, "FLOP/s"),
        "attention_flops_per_s": (1e12, 1e16, "FLOP/s"),
        "memory_bytes_per_s": (1e11, 2.5e13, "bytes per second"),
    },
    "links": {
        "node_bytes_per_s": (1e9, 2e12, "bytes per second"),
        "cluster_bytes_per_s": (1e8, 2e11, "bytes per second"),
        "host_bytes_per_s": (1e9, 1e12, "bytes per second"),
        "node_latency_s": (1e-6, 1e-3, "seconds"),
        "cluster_latency_s": (1e-6, MOST_GPU_S, "seconds"),
    },
}
"""Least and most of what GPUs and their links reach, and the unit: an H100 has 4e14 to 1e15, 3e12, 4e11, 5e10, 5e10 and
2e-5. Rates of fast links in bits per second are above, rates in GB/s far below, and 5 µs in milliseconds is above."""
LEAST_OF_WIDTH = 8
"""Part of `hidden` that the width of attention has at least; layers with linear attention make the mean of Qwen3-Next a
half, and one head of many is a 16th or less."""
MOST_DENSE_OVER_SQUARE = 50
"""Most dense parameters of a layer over the square of its width: models have 3 to 10, a whole model hundreds."""
MOST_ACTIVE_OVER_HIDDEN = 16
"""Most of the width of all experts of a token over `hidden`: published models have 2 to 11, with the width of a dense
layer in the place of an expert's it is 40 and more."""
Rates = Mapping[str, Mapping[str, float]]
"""Values by table and key."""


@dataclass(frozen=True)
class Cluster:
    """Ranks, links and cost model of a file."""

    topology: Topology
    costs: CostModel


def load_cluster(path: Path) -> Cluster:
    """Read a topology file.

    Raises:
        ConfigError: for a key that is unknown, with the nearest known one, a value that is missing or wrong.
        TopologyError: for ranks, slots or links that cannot be.
    """
    return parse_cluster(read_toml(path), source=str(path))


def parse_cluster(values: Mapping[str, Any], *, source: str, num_gpus: int | None = None) -> Cluster:
    """Check values that came from `source`, of a cluster with `num_gpus` in all where it has several groups of ranks.

    Raises:
        ConfigError, TopologyError: as `load_cluster`.
    """
    # before any value is looked at
    refuse_impossible(values, source)
    for name, table in values.items():
        if name not in TABLES:
            raise ConfigError(f"{source}: {unknown_key(name, name, list(TABLES))}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{source}: {name} is {shown(table)}; expected a table")
        known = keys_of(name)
        for key in table:
            if key not in known:
                raise ConfigError(f"{source}: {unknown_key(f'{name}.{key}', key, known)}")
    given = {name: dict(values.get(name, {})) for name in TABLES}
    preset: dict[str, Any] = {
        name: of(given[name].pop("preset")) for name, of in PRESETS.items() if "preset" in given[name]
    }
    hardware = preset.get("hardware")
    if hardware is not None:
        preset["links"] = hardware.links
    is_one_node = _is_one_node(given, hardware, num_gpus)
    if is_one_node and hardware is None:
        # nothing leaves it, so that a link to others would be a figure out of nowhere
        for near, far in ((NODE_LINK, CLUSTER_LINK), ("node_latency_s", "cluster_latency_s")):
            if near in given["links"]:
                given["links"].setdefault(far, given["links"][near])
    _refuse_missing(given, preset, source)
    links = _made("links", given, source, preset.get("links"))
    hardware = _made("hardware", given, source, hardware, links=links)
    if hardware.tile_rows > 1:  # a CPU has no tiles
        _refuse_other_units({"links": links, "hardware": hardware}, source)
    model = _made("model", given, source, preset.get("model"))
    width = hardware.ranks_per_node
    num_ranks = given["topology"].get("num_ranks", width)
    # what is no number is refused below, by its name
    given["topology"].setdefault("ranks_per_node", min(num_ranks, width) if is_whole(num_ranks) else width)
    costs = _made("costs", given, source, model=model, hardware=hardware)
    topology = _made("topology", given, source, links=links)
    if topology.num_nodes > 1:
        _refuse_half_of_links(given["links"], links, source)
    if hardware.tile_rows > 1:
        _warn_of_odd_rates(costs, links, is_one_node, CLUSTER_LINK in values.get("links", {}), source)
    away = model.num_experts - model.num_experts // topology.num_ranks
    if topology.redundant_slots > away > 0:
        warnings.warn(
            f"{source}: redundant_slots is {topology.redundant_slots}; a rank has a use for {away} at most, "
            "as many experts of a layer as are not at home there",
            stacklevel=1,
        )
    return Cluster(topology, costs)


def _is_one_node(given: Mapping[str, Mapping[str, Any]], preset: Hardware | None, num_gpus: int | None) -> bool:
    """Say whether the fast link joins all GPUs."""
    ranks = given["topology"].get("num_ranks") if num_gpus is None else num_gpus
    own = given["hardware"].get("ranks_per_node", (preset or Hardware).ranks_per_node)
    width = given["topology"].get("ranks_per_node", own)
    return is_whole(ranks) and is_whole(width) and ranks <= width


def _refuse_other_units(tables: Mapping[str, Links | Hardware], source: str) -> None:
    """Raise `ConfigError` for seconds of a GPU that are those of another unit."""
    for table, made in tables.items():
        for key in GPU_SECONDS[table]:
            if (value := getattr(made, key)) > MOST_GPU_S:
                raise ConfigError(
                    f"{source}: [{table}] {key} is {value:g}; expected seconds (1 µs is 1e-6), {MOST_GPU_S:g} at most "
                    "on a GPU; a CPU has tile_rows = 1 in [hardware]"
                )


def _refuse_half_of_links(given: Mapping[str, Any], links: Links, source: str) -> None:
    """Raise `ConfigError` where one link is given, and that of a preset beside it makes other nodes the nearer ones."""
    own = [key for key in (NODE_LINK, CLUSTER_LINK) if key in given]
    if len(own) == 1 and links.cluster_bytes_per_s > links.node_bytes_per_s:
        (left,) = {NODE_LINK, CLUSTER_LINK} - set(own)
        raise ConfigError(
            f"{source}: [links] {own[0]} is {getattr(links, own[0]):g} and {left}, of the preset, "
            f"{getattr(links, left):g}: other nodes would be nearer than ranks of the same node. Set {left} too"
        )


def _warn_of_odd_rates(costs: CostModel, links: Links, is_one_node: bool, both_links: bool, source: str) -> None:
    """Warn, once for all of them, of rates that no GPU is known to reach, and of a whole model for one layer."""
    model = costs.model
    # links to other nodes count for nothing on a single one
    unused = {key for key in vars(links) if is_one_node and key.startswith("cluster_")}
    odd = [
        f"[{table}] {key} is {value:g}, and GPUs reach {least:g} to {most:g} {unit}"
        for table, made in (("hardware", costs.hardware), ("links", links))
        for key, (least, most, unit) in GPU_RATES[table].items()
        if key not in unused and not least <= (value := getattr(made, key)) <= most
    ]
    if (not is_one_node or both_links) and links.cluster_bytes_per_s > links.node_bytes_per_s:
        odd.append(
            f"[links] {CLUSTER_LINK} is {links.cluster_bytes_per_s:g}, and {NODE_LINK} {links.node_bytes_per_s:g} "
            "bytes per second: other nodes are nearer than ranks of the same node"
        )
    if model.dense_parameters > MOST_DENSE_OVER_SQUARE * model.hidden**2:
        odd.append(
            f"[model] dense_parameters is {model.dense_parameters:,}, {model.dense_parameters / model.hidden**2:,.0f} "
            f"times the square of hidden; expected those of one layer, {MOST_DENSE_OVER_SQUARE} times at most"
        )
    if (active := model.top_k * model.intermediate) > MOST_ACTIVE_OVER_HIDDEN * model.hidden:
        odd.append(
            f"[model] intermediate is {model.intermediate:,}, which makes {active / model.hidden:.0f} times hidden for "
            f"top_k {model.top_k}; expected the width of one expert (moe_intermediate_size)"
        )
    if 0 < model.attention_width < model.hidden / LEAST_OF_WIDTH:
        odd.append(
            f"[model] attention_width is {model.attention_width}, and hidden {model.hidden}; expected "
            "num_attention_heads x head_dim"
        )
    if odd:
        # said of this line, wherever the file is read, so that reading it again says nothing
        warnings.warn(f"{source}: {'; '.join(odd)}. A CPU has tile_rows = 1 in [hardware]", stacklevel=1)


def _refuse_missing(given: Mapping[str, Mapping[str, Any]], preset: Mapping[str, Any], source: str) -> None:
    """Raise `ConfigError` with all keys of all tables that have no default and were not given."""
    missing = {}
    for table, of in TABLES.items():
        needed = [field.name for field in fields(of) if field.default is MISSING]
        # tables that stand beside, and what follows from the hardware
        known = {*TABLES, *given[table], *(["ranks_per_node"] if table == "topology" else [])}
        if table not in preset and (names := [name for name in needed if name not in known]):
            missing[table] = names
    if missing:
        lines = "\n".join(f"  [{table}] {', '.join(names)}" for table, names in missing.items())
        # links are part of a preset of hardware
        presets = [name for name in PRESETS if name in missing or (name == "hardware" and "links" in missing)]
        hint = f'; or begin {" and ".join(f"[{name}]" for name in presets)} with preset = "NAME"' if presets else ""
        raise ConfigError(f"{source} lacks\n{lines}\nGive them{hint}")


def with_rates(path: Path, rates: Rates) -> str:
    """The content of a topology file with other rates; all else stays, comments too.

    Raises:
        ConfigError: when the file cannot be read, describes nothing, or has these tables in another form than under a
            header of theirs.
    """
    lines = read_text(path, ConfigError, most_bytes=MOST_BYTES).split("\n")
    before = read_toml(path)
    for table, values in rates.items():
        lines = _with_keys(lines, table, values)
    text, expected = "\n".join(lines), {**before, **{t: {**before.get(t, {}), **rates[t]} for t in rates}}
    try:
        # lines were edited as text: what they say now is read again before anything is written
        changed: object = tomllib.loads(text)
    except ValueError:
        changed = None
    if changed != expected:
        raise ConfigError(f"{path} cannot be given rates line by line; write {', '.join(rates)} as tables, [hardware]")
    parse_cluster(expected, source=str(path))
    return text


def write_rates(path: Path, rates: Rates) -> None:
    """Put rates into a topology file: the whole file or nothing. Raises `ConfigError` as `with_rates`."""
    text = with_rates(path, rates)
    with writing_named(path, ConfigError):
        write_atomically(path, text)


def _with_keys(lines: list[str], table: str, values: Mapping[str, float]) -> list[str]:
    """These lines with keys at the head of a table, and nowhere else in it."""
    headers = [n for n, line in enumerate(lines) if line.lstrip().startswith("[")] + [len(lines)]
    begin = next((n for n in headers[:-1] if lines[n].partition("#")[0].strip() == f"[{table}]"), None)
    if begin is None:
        lines, begin, end = [*lines, f"[{table}]"], len(lines), len(lines) + 1
    else:
        end = next(n for n in headers if n > begin)
    pairs = [f"{key} = {json.dumps(value, allow_nan=False)}  # measured" for key, value in values.items()]
    others = [line for line in lines[begin + 1 : end] if line.partition("=")[0].strip() not in values]
    return [*lines[: begin + 1], *pairs, *others, *lines[end:]]


def keys_of(table: str) -> list[str]:
    """The keys that a table may have."""
    own = [field.name for field in fields(TABLES[table]) if field.name not in TABLES]
    return [*(["preset"] if table in PRESETS else []), *own]


def described(cluster: Cluster) -> dict[str, dict[str, int | float | str]]:
    """Every value, by table and key, of a file that describes this cluster."""
    costs, topology = cluster.costs, cluster.topology
    made = {"topology": topology, "hardware": costs.hardware, "links": topology.links, "model": costs.model}
    # nested tables stand beside
    return {
        name: {key: value for key, value in vars(one).items() if isinstance(value, int | float | str)}
        for name, one in {**made, "costs": costs}.items()
    }


def cluster_toml(cluster: Cluster) -> str:
    """The content of a file that describes this cluster, every key given."""
    lines = []
    for name, values in described(cluster).items():
        # numbers and words in JSON are those of TOML
        pairs = [f"{key} = {json.dumps(value, allow_nan=False)}" for key, value in values.items()]
        lines += [f"[{name}]", *pairs, ""]
    return "\n".join(lines)


def _made(table: str, given: Mapping[str, Mapping[str, Any]], source: str, preset: Any = None, **beside: Any) -> Any:
    """Object that a table describes, from its keys, what stands beside it, and a preset for the rest."""
    values = {**given[table], **beside}
    try:
        return TABLES[table](**values) if preset is None else replace(preset, **values)
    except (ConfigError, TopologyError) as error:
        raise type(error)(f"{source}: [{table}] {error}") from error

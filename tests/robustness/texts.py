"""Texts without a checksum that need no torch: topologies and simulations."""

import json
import tomllib

import tomli_w

from foreroute.costs.cluster_file import load_cluster
from foreroute.simulate.config import load_config
from tests.robustness.mutations import damage, forge_values
from tests.robustness.target import Target

TOPOLOGY = {
    "topology": {"num_ranks": 8, "ranks_per_node": 4, "redundant_slots": 2},
    "hardware": {"preset": "h100"},
    "links": {"cluster_bytes_per_s": 22.5e9},
    "model": {"preset": "qwen3-30b-a3b"},
    "costs": {"dispatcher": "dedup"},
}
SIMULATION = {
    "cluster": {"gpus": 16, "expert_parallel": 8, "redundant_slots": 2},
    "hardware": {"preset": "h100"},
    "model": {"preset": "qwen3-30b-a3b"},
    "workload": {"tokens_per_rank": 2048, "micro_steps": 2, "layers": 2},
    "sweep": {"skew": [0.5, 2.0], "expert_parallel": [8]},
}


def text_targets(folder):
    """Their readers."""
    return [
        toml_target("topology", TOPOLOGY, load_cluster, _require_cluster, folder),
        toml_target("simulation", SIMULATION, load_config, _require_simulation, folder),
    ]


def toml_target(name, values, read, check, folder):
    """A reader of TOML. `check` is given the values as a TOML parser sees them, and what the reader made of them."""
    return Target(
        name,
        lambda rng: tomli_w.dumps(values).encode(),
        read,
        file=folder / f"{name}.toml",
        forge=lambda raw, rng: _forge_toml(values, raw, rng),
        check=lambda raw, value: check(tomllib.loads(raw.decode()), value),
    )


def _forge_toml(values, raw, rng):
    forged = forge_values(values, rng)
    try:
        return tomli_w.dumps(forged).encode()
    except (TypeError, AttributeError, UnicodeError, ValueError):  # a null, a lone surrogate, or no table at all
        return damage(raw, rng)


def require_unchanged(given, made, where=""):
    """Raise unless every given value is there as it was given: nothing cast, rounded, renamed or left out."""
    if isinstance(given, dict):
        for key, value in given.items():
            require_unchanged(value, made[key] if isinstance(made, dict) else getattr(made, key), f"{where}.{key}")
    elif isinstance(given, list):
        assert len(given) == len(made), where
        for a, b in zip(given, made, strict=True):
            require_unchanged(a, b, where)
    else:
        assert (float(given) if type(made) is float else given) == made, (where, given, made)
        assert isinstance(given, bool) == isinstance(made, bool), where


def _require_cluster(given, cluster):
    topology, hardware, model = cluster.topology, cluster.costs.hardware, cluster.costs.model
    for values in given.values():
        values.pop("preset", None)
    require_unchanged(given["topology"], topology)
    require_unchanged(given.get("links", {}), topology.links)
    require_unchanged(given.get("hardware", {}), hardware)
    require_unchanged(given.get("model", {}), model)
    require_unchanged(given.get("costs", {}), cluster.costs)
    assert topology.num_ranks % topology.ranks_per_node == 0
    assert topology.redundant_slots >= 0
    assert all(0 < value < float("inf") for value in vars(topology.links).values())


def _require_simulation(given, config):
    require_unchanged(given.get("cluster", {}), config.cluster)
    require_unchanged(given.get("workload", {}), config.workload)
    require_unchanged(given.get("execution", {}), config.execution)
    require_unchanged(given.get("sweep", {}), config.sweep)
    assert config.cluster.gpus % config.cluster.expert_parallel == 0


def json_lines(values):
    """One object a line."""
    return "".join(json.dumps(value) + "\n" for value in values).encode()

"""What planning reads: topologies and simulations, which are texts, and plans and counts, which have checksums."""

import json
import tomllib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import tomli_w

from foreroute.costs.cluster_file import load_cluster
from foreroute.layout import Packing
from foreroute.plan.counts import COUNTS_FILE, load_counts
from foreroute.plan.plan_file import load_plan, plan_to_bytes
from foreroute.simulate.config import load_config
from tests.plan.random_plans import small_case
from tests.robustness.mutations import damage, forge, forge_values
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
}


def text_targets(folder):
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
    for name in ("cluster", "workload", "execution"):
        require_unchanged(given.get(name, {}), getattr(config, name))
    assert config.cluster.gpus % config.cluster.expert_parallel == 0


def json_lines(values):
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def plan_targets(folder):

    def target(name, make, read, check, weight):
        return Target(
            name, make, read, file=folder / "given.file", forge=forge, check=check, has_checksum=True, weight=weight
        )

    return [
        target("plan", _plan_bytes, load_plan, _require_executable, 3),
        target("counts", _counts_bytes, load_counts, _require_counts, 1),
    ]


def _require_executable(raw, plan):
    """Raise unless an executor could index with a plan."""
    micro_steps, layers, experts = plan.shape
    ranks, slots = plan.topology.num_ranks, plan.topology.redundant_slots
    hosts, offsets = plan.hosts, [int(x) for x in plan.hosts.offsets]
    assert len(offsets) == micro_steps * layers + 1
    assert offsets[0] == 0, offsets
    assert offsets[-1] == len(hosts.expert_R) == len(hosts.rank_R) == len(hosts.slot_R) == len(hosts.tokens_RG)
    assert all(a <= b for a, b in pairwise(offsets)), offsets
    for name, values, size in (
        ("expert", hosts.expert_R, experts),
        ("rank", hosts.rank_R, ranks),
        ("slot", hosts.slot_R, slots),
    ):
        assert all(0 <= int(value) < size for value in values), name
    for homes in (*plan.home_LE.tolist(), *plan.previous_home_LE.tolist()):
        assert sorted(homes) == sorted(list(range(ranks)) * (experts // ranks))
    assert (hosts.tokens_RG >= 0).all()
    if plan.packing is not None:
        assert len(plan.packing.rank_S) == len(plan.packing.micro_step_S)
        assert all(0 <= int(m) < micro_steps for m in plan.packing.micro_step_S)
        assert all(0 <= int(g) < ranks for g in plan.packing.rank_S)
    for start, stop in pairwise(offsets):
        taken = list(zip(hosts.rank_R[start:stop].tolist(), hosts.slot_R[start:stop].tolist(), strict=True))
        assert len(set(taken)) == len(taken), taken


def _require_counts(raw, counts_MLGE):
    assert counts_MLGE.ndim == 4
    assert counts_MLGE.dtype.kind in "iu"
    assert min(counts_MLGE.shape) >= 1
    assert all(0 <= count < 2**31 for count in counts_MLGE.reshape(-1).tolist())


def _plan_bytes(rng):
    """With a packing, of one to six ranks."""
    ranks = int(rng.choice([1, 2, 4, 6]))
    micro_steps, layers = (int(n) for n in rng.integers(1, 4, 2))
    sizes = {"ranks": ranks, "experts": 2 * ranks, "micro_steps": micro_steps, "layers": layers}
    plan, _ = small_case(int(rng.integers(2**31)), slots=int(rng.integers(1, 3)), moves=2, **sizes)
    rows = rng.integers(0, micro_steps, 5, np.int32), rng.integers(0, ranks, 5, np.int32)
    return plan_to_bytes(replace(plan, packing=Packing(*rows, micro_steps, ranks), tokens_digest=rng.bytes(16).hex()))


def _counts_bytes(rng):
    micro_steps, layers, ranks, each = (int(n) for n in rng.integers(1, 5, 4))
    shape = (micro_steps, layers, ranks, ranks * each)
    return COUNTS_FILE.to_bytes({}, {"counts_MLGE": rng.integers(0, 500, shape, np.int32)})

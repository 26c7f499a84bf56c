"""Checksums of random plans without priced options, whose homes stay.

`python -m tests.planner.plan_digests > tests/planner/plan_digests.txt` records them anew after a change of the search
that was meant.
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np

from foreroute.plan import PlanOptions, StepPlan, Topology
from foreroute.plan.hosts import Hosts
from foreroute.planner import plan
from tests.plan.random_plans import LINKS

NUM_RANDOM = 160
RECORDED = Path(__file__).with_suffix(".txt")
ARRAYS = (*Hosts._fields, "max_load_ML", "bound_ML")


def digest(found: StepPlan) -> str:
    """128 bits over dtype, shape and bytes of every array of a plan."""
    state = blake2b(digest_size=16)
    for name in ARRAYS:
        array = found.tensors[name]
        state.update(repr((name, array.dtype.str, array.shape)).encode())
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()


def random_options(rng: np.random.Generator) -> PlanOptions:
    """Any of the options that are not priced."""
    return PlanOptions(
        tolerance=float(rng.choice([0.0, 0.02, 0.1])),
        home_moves=[0, 0, 4, None][int(rng.integers(4))],
        replicas=bool(rng.random() < 0.9),
        slots=("layer", "shared")[int(rng.integers(2))],
        locality=bool(rng.random() < 0.8),
        traffic=False,
        pay_off=False,
        threads=int(rng.integers(1, 4)),
    )


def random_case(seed: int) -> tuple[PlanOptions, StepPlan]:
    """The plan of a random step: ranks, nodes, slots, options, homes and skew all follow from the seed.

    Counts are drawn in whole numbers, so that they are the same on every processor.
    """
    rng = np.random.default_rng(seed)
    options = random_options(rng)
    nodes, per_node = int(rng.choice([1, 1, 2, 4])), int(rng.choice([1, 2, 4, 8]))
    ranks = nodes * per_node
    experts = ranks * int(rng.integers(1, 5)) * (1 if ranks > 8 else 2)
    micro_steps, layers = int(rng.integers(1, 12)), int(rng.integers(1, 5))
    topology = Topology(ranks, per_node, int(rng.integers(0, 4)), LINKS)
    skew, most = int(rng.choice([1, 2, 4])), int(rng.choice([3, 200, 5000]))
    taste = rng.integers(0, 64, (micro_steps, layers, 1, experts)) ** skew
    counts = taste * rng.integers(0, 8, (micro_steps, layers, ranks, experts)) * most // 64**skew
    homes = np.stack([rng.permutation(topology.contiguous_home_LE(1, experts)[0]) for _ in range(layers)])
    return options, plan(counts, topology, options, home_LE=homes if seed % 2 else None)


if __name__ == "__main__":
    for seed in range(NUM_RANDOM):
        options, found = random_case(seed)
        if options.home_moves == 0:
            sys.stdout.write(f"random {seed} {digest(found)}\n")

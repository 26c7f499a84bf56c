"""Plan files and counts files, which have checksums."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from foreroute.layout import Packing
from foreroute.plan.counts import COUNTS_FILE, load_counts
from foreroute.plan.plan_file import load_plan, plan_to_bytes
from tests.plan.random_plans import small_case
from tests.robustness.mutations import forge
from tests.robustness.target import Target


def plan_targets(folder):
    """Their readers."""

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
    """Raise unless an array can be counts."""
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

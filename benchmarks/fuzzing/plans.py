"""Plan files and counts files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.fuzzing.mutations import forge
from benchmarks.fuzzing.target import Target, written
from foreroute.layout import Packing
from foreroute.plan import Hosts, Links, StepPlan, Topology
from foreroute.plan.counts import COUNTS_FILE, load_counts
from foreroute.plan.plan_file import load_plan, plan_to_bytes


def plan_targets(folder: Path) -> list[Target]:
    """The readers of plans and of counts."""
    plan = Target(
        name="plan",
        make=plan_bytes,
        read=lambda raw: load_plan(written(raw, folder / "plan")),
        same=same_plan,
        forge=lambda raw, rng: forge(raw, rng),
        check=lambda raw, plan: require_executable(plan),
        has_checksum=True,
        weight=3.0,
    )
    counts = Target(
        name="counts",
        make=_counts_bytes,
        read=lambda raw: load_counts(written(raw, folder / "counts")),
        same=lambda a, b: a.shape == b.shape and bool((a == b).all()),
        forge=lambda raw, rng: forge(raw, rng),
        check=lambda raw, counts: require_counts(counts),
        has_checksum=True,
        weight=1.0,
    )
    return [plan, counts]


def require_executable(plan: StepPlan) -> None:
    """Raise unless an executor could index with a plan, by rules written out here."""
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


def require_counts(counts_MLGE: NDArray[Any]) -> None:
    """Raise unless an array can be counts."""
    assert counts_MLGE.ndim == 4
    assert counts_MLGE.dtype.kind in "iu"
    assert min(counts_MLGE.shape) >= 1
    assert all(0 <= count < 2**31 for count in counts_MLGE.reshape(-1).tolist())


def _counts_bytes(rng: np.random.Generator) -> bytes:
    micro_steps, layers, ranks, each = (int(n) for n in rng.integers(1, 5, 4))
    shape = (micro_steps, layers, ranks, ranks * each)
    return COUNTS_FILE.to_bytes({}, {"counts_MLGE": rng.integers(0, 500, shape, np.int32)})


def plan_bytes(rng: np.random.Generator) -> bytes:
    """The file of a plan of random homes, with a replica of the next expert in the first slot of some ranks."""
    num_ranks = int(rng.choice([1, 2, 4, 6]))
    num_micro_steps, num_layers, num_experts = (*(int(n) for n in rng.integers(1, 4, 2)), 2 * num_ranks)
    home_LE = np.stack([rng.permutation(np.arange(num_experts) % num_ranks) for _ in range(num_layers)])
    cell_R, rank_R = np.nonzero(rng.random((num_micro_steps * num_layers, num_ranks)) < (0.7 if num_ranks > 1 else 0))
    expert_R = np.argmax(home_LE[cell_R % num_layers] != rank_R[:, None], axis=1)
    shape = (num_micro_steps, num_layers)
    tokens_RG = rng.integers(0, int(rng.choice([2, 300, 70_000])), (len(rank_R), num_ranks))
    plan = StepPlan(
        topology=Topology(num_ranks, 1, 1, Links(1e11, 1e10, 1e10, 1e-5, 1e-4)),
        previous_home_LE=home_LE.astype(np.int16),
        hosts=Hosts(
            home_LE=home_LE.astype(np.int16),
            offsets=np.searchsorted(cell_R, np.arange(num_micro_steps * num_layers + 1)),
            expert_R=expert_R.astype(np.int16),
            rank_R=rank_R.astype(np.int16),
            slot_R=np.zeros(len(rank_R), np.int16),
            fetched_R=np.ones(len(rank_R), np.bool_),
            tokens_RG=tokens_RG.astype(np.int32),
        ),
        max_load_ML=rng.integers(1, 1000, shape),
        bound_ML=rng.random(shape),
        counts_digest=rng.bytes(16).hex(),
        slots="shared",
        packing=Packing(
            rng.integers(0, num_micro_steps, 5, np.int32), rng.integers(0, num_ranks, 5, np.int32), shape[0], num_ranks
        ),
        tokens_digest=rng.bytes(16).hex(),
    )
    return plan_to_bytes(plan)


def same_plan(a: StepPlan, b: StepPlan) -> bool:
    """Whether two plans are equal in every field."""
    parts = [(a.tensors[name], b.tensors[name]) for name in a.tensors]
    if (a.packing is None) != (b.packing is None) or not all(np.array_equal(x, y) for x, y in parts):
        return False
    return all(getattr(a, name) == getattr(b, name) for name in ("topology", "slots", "counts_digest", "tokens_digest"))

"""What a fuzzer needs to attack the plan file: valid plans of no merit, the reader, and when two plans are equal."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np

from foreroute.balance import Links, StepPlan, Topology
from foreroute.balance.plan_file import encode_plan, load_plan


def plan_bytes(rng: np.random.Generator) -> bytes:
    """The file of a plan of random homes, with a replica of the next expert in the first slot of some ranks."""
    from safetensors.numpy import save

    num_ranks = int(rng.choice([1, 2, 4, 6]))
    num_micro_steps, num_layers, num_experts = (*(int(n) for n in rng.integers(1, 4, 2)), 2 * num_ranks)
    home_LE = np.stack([rng.permutation(np.arange(num_experts) % num_ranks) for _ in range(num_layers)])
    cell_R, rank_R = np.nonzero(rng.random((num_micro_steps * num_layers, num_ranks)) < (0.7 if num_ranks > 1 else 0))
    expert_R = np.argmax(home_LE[cell_R % num_layers] != rank_R[:, None], axis=1)
    shape = (num_micro_steps, num_layers)
    tokens_RG = rng.integers(0, int(rng.choice([2, 300, 70_000])), (len(rank_R), num_ranks))
    plan = StepPlan(
        topology=Topology(num_ranks, 1, 1, Links(1e11, 1e10, 1e10, 1e-5, 1e-4)),
        shape=(*shape, num_experts),
        previous_home_LE=home_LE.astype(np.int16),
        home_LE=home_LE.astype(np.int16),
        offsets=np.searchsorted(cell_R, np.arange(num_micro_steps * num_layers + 1)),
        expert_R=expert_R.astype(np.int16),
        rank_R=rank_R.astype(np.int16),
        slot_R=np.zeros(len(rank_R), np.int16),
        fetched_R=np.ones(len(rank_R), np.bool_),
        tokens_RG=tokens_RG.astype(np.int32),
        max_load_ML=rng.integers(0, 1000, shape),
        bound_ML=rng.random(shape),
        counts_digest=rng.bytes(16).hex(),
    )
    metadata, tensors = encode_plan(plan)
    raw: bytes = save(tensors, metadata=metadata)
    return raw


def load_bytes(raw: bytes, path: Path) -> StepPlan:
    """What the reader makes of a file with these bytes."""
    path.write_bytes(raw)
    return load_plan(path)


def same(a: StepPlan, b: StepPlan) -> bool:
    """Whether two plans are equal in every field."""
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(StepPlan)]
    return all(np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y for x, y in pairs)

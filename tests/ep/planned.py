"""Random valid plans of given counts."""

from dataclasses import replace

import numpy as np

from foreroute.plan.checker import verify
from foreroute.plan.counts import counts_digest
from tests.ep.transfer.plans import random_plan

SLOTS = 2


def static_plan(counts_MLGE, home_LE=None):
    """Every expert at its home alone, in blocks by default."""
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLGE.shape
    shape = {"ranks": num_ranks, "experts": num_experts, "micro_steps": num_micro_steps, "layers": num_layers}
    plan = random_plan(0, **shape, slots=0, shuffled=False)
    topology = replace(plan.topology, redundant_slots=SLOTS)
    hosts = plan.hosts if home_LE is None else plan.hosts._replace(home_LE=home_LE)
    return finished(replace(plan, topology=topology, hosts=hosts), counts_MLGE)


def split_plan(seed, counts_MLGE, home_LE, *, slots=SLOTS, keep=0.5, sharing=None):
    """Replicas drawn at random, each with a random share of what its expert still has of every source."""
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLGE.shape
    shape = {"ranks": num_ranks, "experts": num_experts, "micro_steps": num_micro_steps, "layers": num_layers}
    plan = random_plan(seed, **shape, slots=slots, keep=keep, homes=home_LE, sharing=sharing)
    rng = np.random.default_rng(seed)
    tokens_RG = np.zeros_like(plan.hosts.tokens_RG)
    for c in range(num_micro_steps * num_layers):
        rest_EG = counts_MLGE.reshape(-1, num_ranks, num_experts)[c].T.copy()
        for r in range(plan.hosts.offsets[c], plan.hosts.offsets[c + 1]):
            rest_G = rest_EG[plan.hosts.expert_R[r]]
            tokens_RG[r] = rng.integers(0, rest_G + 1) if rng.random() < 0.8 else rest_G
            rest_EG[plan.hosts.expert_R[r]] = rest_G - tokens_RG[r]
    return finished(replace(plan, hosts=plan.hosts._replace(tokens_RG=tokens_RG)), counts_MLGE)


def finished(plan, counts_MLGE):
    """With its figures, and checked."""
    num_micro_steps, num_layers, _ = plan.shape
    max_load_ML = np.array(
        [
            [plan.cell(m, layer).loads_G(counts_MLGE[m, layer]).max() for layer in range(num_layers)]
            for m in range(num_micro_steps)
        ]
    )
    mean_ML = counts_MLGE.sum(axis=(2, 3)) / plan.topology.num_ranks
    plan = replace(
        plan,
        max_load_ML=max_load_ML,
        bound_ML=mean_ML,
        counts_digest=counts_digest(counts_MLGE),
        previous_home_LE=plan.home_LE,
    )
    verify(plan, counts_MLGE)
    return plan

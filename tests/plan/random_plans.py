"""Valid plans of no merit, made without the planner: random replicas that persist in their slots, random splits."""

import numpy as np

from foreroute.plan import Links, StepPlan, Topology
from foreroute.plan.counts import counts_digest
from foreroute.plan.hosts import Hosts

LINKS = Links(340e9, 45e9, 50e9, 20e-6, 50e-6)


def random_counts(seed, shape, most=30):
    rng = np.random.default_rng(seed)
    return rng.integers(0, most, shape) * (rng.random(shape) < 0.7)


def random_plan(counts_MLGE, topology, *, seed=0, moves=0, keep=0.5, homes=None, sharing=None):
    """Fill each slot with a random expert, which stays with probability `keep` from micro-step to micro-step.

    Homes are drawn too, where none are given. Slots that nothing stays in are shared, unless `sharing` says otherwise;
    in those that are to be shared nothing stays. The replicas of a cell are in no order.
    """
    rng, order = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    keep = 0.0 if sharing == "shared" else keep
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLGE.shape
    before_LE = np.stack([rng.permutation(topology.contiguous_home_E(num_experts)) for _ in range(num_layers)])
    before_LE = before_LE if homes is None else homes
    home_LE = before_LE.copy()
    for home_E in home_LE:
        for _ in range(moves // 2):
            a, b = rng.choice(num_experts, 2, replace=False)
            home_E[a], home_E[b] = home_E[b], home_E[a]
    slots_LGP = np.full((num_layers, num_ranks, topology.redundant_slots), -1)
    replicas, offsets, largest_ML = [], [0], np.zeros((num_micro_steps, num_layers), np.int64)
    for m in range(num_micro_steps):
        for layer in range(num_layers):
            counts_EG = counts_MLGE[m, layer].T
            rest_EG, loads_G = counts_EG.copy(), np.zeros(num_ranks, np.int64)
            for rank, slot in np.ndindex(slots_LGP.shape[1:]):
                kept = slots_LGP[layer, rank, slot]
                fetched = bool(kept < 0 or rng.random() > keep)
                expert = int(rng.integers(num_experts)) if fetched else int(kept)
                others = [e for e, r, *_ in replicas[offsets[-1] :] if r == rank]
                if (expert == kept and fetched) or expert in others or home_LE[layer, expert] == rank:
                    continue
                tokens_G = rng.integers(0, rest_EG[expert] + 1)
                rest_EG[expert] -= tokens_G
                loads_G[rank] += tokens_G.sum()
                slots_LGP[layer, rank, slot] = expert
                replicas.append((expert, rank, slot, fetched, tokens_G))
            cell = replicas[offsets[-1] :]
            order.shuffle(cell)
            replicas[offsets[-1] :] = cell
            np.add.at(loads_G, home_LE[layer], rest_EG.sum(axis=1))
            largest_ML[m, layer] = loads_G.max()
            offsets.append(len(replicas))
    columns = list(zip(*replicas, strict=True)) or [[]] * 5
    return StepPlan(
        topology=topology,
        previous_home_LE=before_LE,
        hosts=Hosts(
            home_LE=home_LE,
            offsets=np.array(offsets, np.int64),
            expert_R=np.array(columns[0], np.int16),
            rank_R=np.array(columns[1], np.int16),
            slot_R=np.array(columns[2], np.int16),
            fetched_R=np.array(columns[3], np.bool_),
            tokens_RG=np.array(columns[4], np.int32).reshape(-1, num_ranks),
        ),
        max_load_ML=largest_ML,
        bound_ML=counts_MLGE.sum(axis=(2, 3)) / num_ranks,
        counts_digest=counts_digest(counts_MLGE),
        slots=sharing or ("shared" if all(columns[3]) else "layer"),
    )


def small_case(seed=0, *, ranks=4, experts=8, slots=2, micro_steps=3, layers=2, **how):
    topology = Topology(ranks, max(1, ranks // 2), slots, LINKS)
    counts = random_counts(seed, (micro_steps, layers, ranks, experts))
    return random_plan(counts, topology, seed=seed, **how), counts

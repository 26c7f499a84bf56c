"""Valid plans of no merit, made without the planner: random replicas that persist in their slots, random splits."""

from dataclasses import replace

import numpy as np

from foreroute.plan import CellPlan, Links, StepPlan, Topology
from foreroute.plan.counts import counts_digest
from foreroute.plan.hosts import Hosts

LINKS = Links(340e9, 45e9, 50e9, 20e-6, 50e-6)


def random_counts(seed, shape, most=30):
    rng = np.random.default_rng(seed)
    return rng.integers(0, most, shape) * (rng.random(shape) < 0.7)


def skewed_counts(seed, shape, evenness=0.3, tokens=400):
    """Experts that are hot in a micro-step and layer on all ranks alike, nearly."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(shape[3], evenness), shape[:2])[:, :, None]
    noise = rng.dirichlet(np.full(shape[3], 2.0), shape[:3])
    return rng.multinomial(rng.integers(tokens // 2, tokens, shape[:3]), 0.8 * share + 0.2 * noise)


def random_plan(counts_MLGE, topology, *, seed=0, moves=0, keep=0.5, homes=None, sharing=None):
    """Fill each slot with a random expert, which stays with probability `keep` from micro-step to micro-step.

    Homes are drawn too, where none are given. Slots that nothing stays in are shared, unless `sharing` says otherwise;
    in those that are to be shared nothing stays. The replicas of a cell are in no order.
    """
    rng, order = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    keep = 0.0 if sharing == "shared" else keep
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLGE.shape
    before_LE = np.stack([rng.permutation(topology.contiguous_home_LE(1, num_experts)[0]) for _ in range(num_layers)])
    before_LE = before_LE if homes is None else homes
    home_LE = before_LE.copy()
    for home_E in home_LE:
        for _ in range(moves // 2):
            a, b = rng.choice(num_experts, 2, replace=False)
            home_E[a], home_E[b] = home_E[b], home_E[a]
    slots_LGP = np.full((num_layers, num_ranks, topology.redundant_slots), -1)
    cells = []
    for m, layer in np.ndindex(num_micro_steps, num_layers):
        rest_EG, replicas = counts_MLGE[m, layer].T.copy(), []
        for rank, slot in np.ndindex(slots_LGP.shape[1:]):
            kept = slots_LGP[layer, rank, slot]
            fetched = bool(kept < 0 or rng.random() > keep)
            expert = int(rng.integers(num_experts)) if fetched else int(kept)
            others = [e for e, r, *_ in replicas if r == rank]
            if (expert == kept and fetched) or expert in others or home_LE[layer, expert] == rank:
                continue
            tokens_G = rng.integers(0, rest_EG[expert] + 1)
            rest_EG[expert] -= tokens_G
            slots_LGP[layer, rank, slot] = expert
            replicas.append((expert, rank, slot, fetched, tokens_G))
        order.shuffle(replicas)
        *places, fetched_R, tokens_RG = zip(*replicas, strict=True) if replicas else [()] * 5
        tokens_RG = np.array(tokens_RG, np.int32).reshape(-1, num_ranks)
        places = (np.array(each, np.int16) for each in places)
        cells.append(CellPlan(home_LE[layer], *places, np.array(fetched_R, np.bool_), tokens_RG))
    return plan_of_cells(cells, home_LE, counts_MLGE, topology, sharing, before_LE)


def plan_of_cells(cells, home_LE, counts_MLGE, topology, sharing=None, before_LE=None):
    hosts = Hosts.of_cells(home_LE, cells)
    places = np.ndindex(counts_MLGE.shape[:2])
    loads = [cell.loads_G(counts_MLGE[place]) for place, cell in zip(places, cells, strict=True)]
    return StepPlan(
        topology=topology,
        previous_home_LE=home_LE if before_LE is None else before_LE,
        hosts=hosts,
        max_load_ML=np.max(loads, axis=1).reshape(counts_MLGE.shape[:2]),
        bound_ML=counts_MLGE.sum(axis=(2, 3)) / topology.num_ranks,
        counts_digest=counts_digest(counts_MLGE),
        slots=sharing or ("shared" if hosts.fetched_R.all() else "layer"),
    )


def changed(plan, name, place, value):
    """The plan with another value in one of its arrays."""
    array = plan.tensors[name].copy()
    array[place] = value
    return with_arrays(plan, **{name: array})


def with_arrays(plan, **arrays):
    """The plan with other arrays, in its hosts or beside them."""
    of_hosts = {name: arrays.pop(name) for name in Hosts._fields if name in arrays}
    return replace(plan, hosts=plan.hosts._replace(**of_hosts), **arrays)


def small_case(seed=0, *, ranks=4, experts=8, slots=2, micro_steps=3, layers=2, **how):
    topology = Topology(ranks, max(1, ranks // 2), slots, LINKS)
    counts = random_counts(seed, (micro_steps, layers, ranks, experts))
    return random_plan(counts, topology, seed=seed, **how), counts

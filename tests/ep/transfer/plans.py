"""Random valid plans, made by hand, and the order in which their cells run."""

import numpy as np

from foreroute.ep.transfer import Cell
from foreroute.plan import Hosts, Links, StepPlan, Topology

LINKS = Links(
    node_bytes_per_s=4e9, cluster_bytes_per_s=1e9, host_bytes_per_s=2e9, node_latency_s=1e-5, cluster_latency_s=5e-5
)


def random_homes(rng, num_experts, num_ranks):
    return rng.permutation(np.arange(num_experts) % num_ranks).astype(np.int16)


def random_plan(
    seed,
    *,
    ranks,
    experts=8,
    micro_steps=2,
    layers=3,
    slots=2,
    per_node=None,
    keep=0.0,
    shuffled=True,
    homes=None,
    sharing=None,
):
    """A plan whose replicas, slots and kept slots are drawn at random. Token splits are left at zero.

    Args:
        seed: of everything drawn.
        ranks: G.
        experts: E.
        micro_steps: M.
        layers: L.
        slots: P.
        per_node: ranks of a node; all by default.
        keep: share of replicas that stay in their slot from the micro-step before, as per-layer slots allow.
        shuffled: False leaves experts at their usual homes, in blocks.
        homes: int16 [L, E], instead of drawing them.
        sharing: of slots; by default "layer", or "shared" where no replica stays.
    """
    rng = np.random.default_rng(seed)
    topology = Topology(ranks, per_node or ranks, slots, LINKS)
    blocks_E = topology.contiguous_home_E(experts)
    home_LE = np.stack([random_homes(rng, experts, ranks) if shuffled else blocks_E for _ in range(layers)])
    home_LE = home_LE if homes is None else homes
    rows, offsets, held = [], [0], {}
    for _ in range(micro_steps):
        for layer in range(layers):
            cell = _random_cell(rng, home_LE[layer], ranks, slots, held.get(layer, {}), keep)
            held[layer] = {**held.get(layer, {}), **{(rank, slot): expert for expert, rank, slot, _ in cell}}
            rows += cell
            offsets.append(len(rows))
    expert_R, rank_R, slot_R, fetched_R = np.array(rows, np.int64).reshape(-1, 4).T
    fetched_R = np.ones_like(fetched_R) if sharing == "shared" else fetched_R
    return StepPlan(
        topology,
        home_LE,
        Hosts(
            home_LE,
            np.array(offsets),
            expert_R.astype(np.int16),
            rank_R.astype(np.int16),
            slot_R.astype(np.int16),
            fetched_R.astype(np.bool_),
            np.zeros((len(rows), ranks), np.int32),
        ),
        np.zeros((micro_steps, layers), np.int64),
        np.zeros((micro_steps, layers)),
        "0" * 32,
        sharing or ("shared" if fetched_R.all() else "layer"),
    )


def no_tokens(plan):
    """int32 [M, L, G, E], the counts of a plan that serves no token."""
    num_micro_steps, num_layers, num_experts = plan.shape
    return np.zeros((num_micro_steps, num_layers, plan.topology.num_ranks, num_experts), np.int32)


def _random_cell(rng, home_E, ranks, slots, held, keep):
    cell, taken = [], set()
    for rank in range(ranks):
        for slot in rng.permutation(slots)[: rng.integers(slots + 1)].tolist():
            kept = (rank, slot) in held and rng.random() < keep
            expert = held[rank, slot] if kept else int(rng.integers(len(home_E)))
            if home_E[expert] != rank and (expert, rank) not in taken:
                taken.add((expert, rank))
                cell.append((expert, rank, slot, held.get((rank, slot)) != expert))
    return [cell[i] for i in rng.permutation(len(cell))]


def asked(num_micro_steps, num_layers, *, updating, checkpointed):
    """The cells of a step in the order in which they run, with repeats."""
    for micro_step in range(num_micro_steps):
        cells = [Cell(0, micro_step, layer) for layer in range(num_layers)]
        yield from cells
        for cell in reversed(cells) if updating else ():
            yield from [cell] * (1 + checkpointed)


def least_fetches_L(plan):
    """int64 [L], the fewest experts that one pass over a step can fetch for each layer: what the plan does not keep."""
    num_micro_steps, num_layers, _ = plan.shape
    before_R = np.concatenate([[0], np.cumsum(plan.hosts.fetched_R, dtype=np.int64)])
    fetches_ML = np.diff(before_R[plan.hosts.offsets]).reshape(num_micro_steps, num_layers)
    return fetches_ML.sum(axis=0)

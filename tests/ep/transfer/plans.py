"""Random plans for ranks of one node, and the order in which their cells run."""

import numpy as np

from foreroute.ep.transfer.cells import Cell
from foreroute.layout.rank_rows import block_homes
from foreroute.plan import Topology
from tests.plan import random_plans
from tests.plan.random_plans import LINKS

SLOTS = 2


def random_plan(seed, *, ranks, experts=8, micro_steps=2, layers=3, slots=2, per_node=None, keep=0.0, **how):
    """One that serves no token; `how` as `random_plans.random_plan` takes it."""
    counts_MLGE = np.zeros((micro_steps, layers, ranks, experts), np.int32)
    return random_plans.random_plan(
        counts_MLGE, Topology(ranks, per_node or ranks, slots, LINKS), seed=seed, keep=keep, **how
    )


def split_plan(seed, counts_MLGE, home_LE, *, slots=SLOTS, sharing=None):
    """One that gives replicas random shares of the tokens."""
    topology = Topology(counts_MLGE.shape[2], counts_MLGE.shape[2], slots, LINKS)
    return random_plans.random_plan(counts_MLGE, topology, seed=seed, homes=home_LE, sharing=sharing)


def static_plan(counts_MLGE, home_LE=None):
    """Every expert at its home alone, in blocks by default."""
    num_layers, num_ranks, num_experts = counts_MLGE.shape[1:]
    block_LE = np.tile(block_homes(num_experts, num_ranks).astype(np.int16), (num_layers, 1))
    return split_plan(0, counts_MLGE, block_LE if home_LE is None else home_LE, slots=0)


def no_tokens(plan):
    num_micro_steps, num_layers, num_experts = plan.shape
    return np.zeros((num_micro_steps, num_layers, plan.topology.num_ranks, num_experts), np.int32)


def loads_MLG(plan, counts_MLGE):
    """Rows that the experts of each rank compute under a plan."""
    loads = [plan.cell(*place).loads_G(counts_MLGE[place]) for place in np.ndindex(plan.shape[:2])]
    return np.reshape(loads, (*plan.shape[:2], -1))


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
    layer_R = np.repeat(np.arange(num_micro_steps * num_layers) % num_layers, np.diff(plan.hosts.offsets))
    return np.bincount(layer_R, plan.hosts.fetched_R, num_layers).astype(np.int64)

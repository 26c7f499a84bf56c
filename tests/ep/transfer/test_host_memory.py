"""What the host path takes, page-locks and waits for, against counts from the plan; and what closing it waits for."""

from contextlib import closing
from unittest.mock import patch

import numpy as np
import torch

from foreroute.ep.transfer import host_memory
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import begin, make_engine

EXPERT_BYTES = 2 * 4096
"""Whole pages, so that nothing is rounded."""


def engine_of(plan, rank, options=None):
    num_local = plan.shape[2] // plan.topology.num_ranks
    homes = [{"weight": torch.zeros(num_local, EXPERT_BYTES // 8, dtype=torch.float64)} for _ in range(plan.shape[1])]
    return make_engine(plan, rank, options, homes=homes)


def sent_in(plan, node):
    """(layer, expert, home, rank of a replica) within a node, by a walk over all cells."""
    per_node, found = plan.topology.ranks_per_node, set()
    for micro_step, layer in np.ndindex(*plan.shape[:2]):
        cell = plan.cell(micro_step, layer)
        for expert, rank in zip(cell.expert_R.tolist(), cell.rank_R.tolist(), strict=True):
            home = int(cell.home_E[expert])
            if home != rank and home // per_node == rank // per_node == node:
                found.add((layer, expert, home, rank))
    return found


def published(rank, plans, steps):
    """Experts that this rank writes as each plan begins."""
    found = []
    with (
        closing(engine_of(plans[0], rank)) as engine,
        patch.object(host_memory.HostMemory, "_write", lambda memory, experts, is_mine_LE: found[-1].extend(experts)),
    ):
        for step, plan in zip(steps, plans, strict=True):
            found.append([])
            begin(engine, step, plan)
    return [sorted(each) for each in found]


def test_a_step_publishes_what_its_plans_send_and_nothing_twice(workers):
    one = random_plan(0, ranks=4, per_node=2)
    other = random_plan(1, ranks=4, per_node=2, homes=one.home_LE)
    plans, steps = [one, other, one, one], [7, 7, 7, 8]
    for rank, found in enumerate(workers(4).run(published, plans, steps)):
        first, second = ({sent[:2] for sent in sent_in(plan, rank // 2) if sent[2] == rank} for plan in (one, other))
        assert found == [sorted(first), sorted(second - first), [], sorted(first)]
        assert first
        assert second - first

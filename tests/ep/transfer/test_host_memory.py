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
    """As each plan begins, experts that this rank writes, and bytes that its node takes for them."""
    written, taken, take = [], [], host_memory.HostMemory._map_shared
    num_layers, num_local = plans[0].shape[1], plans[0].shape[2] // plans[0].topology.num_ranks
    homes = [{"weight": torch.zeros(num_local, EXPERT_BYTES // 8, dtype=torch.float64)} for _ in range(num_layers)]
    with (
        closing(make_engine(plans[0], rank, homes=homes)) as engine,
        patch.object(host_memory.HostMemory, "_write", lambda memory, experts, is_mine_LE: written[-1].extend(experts)),
        patch.object(host_memory.HostMemory, "_map_shared", lambda *given: taken.append(given[1]) or take(*given)),
    ):
        for step, plan in zip(steps, plans, strict=True):
            written.append([])
            begin(engine, step, plan)
    return [sorted(each) for each in written], taken


def test_a_step_publishes_what_its_plans_send_and_nothing_twice(workers):
    one = random_plan(0, ranks=4, per_node=2)
    other = random_plan(1, ranks=4, per_node=2, homes=one.home_LE)
    plans, steps = [one, other, one, one], [7, 7, 7, 8]
    for rank, (written, taken) in enumerate(workers(4).run(published, plans, steps)):
        sent = [sent_in(plan, rank // 2) for plan in (one, other)]
        first, second = ({each[:2] for each in of_plan if each[2] == rank} for of_plan in sent)
        assert written == [sorted(first), sorted(second - first), [], sorted(first)]
        assert first
        assert second - first
        there, more = ({each[:2] for each in of_plan} for of_plan in sent)
        assert taken == [EXPERT_BYTES * len(each) for each in (there, more - there)]

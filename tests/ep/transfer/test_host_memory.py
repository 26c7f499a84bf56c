"""What the host path takes, page-locks and waits for, against counts from the plan; and what closing it waits for."""

from contextlib import ExitStack, closing, nullcontext
from types import SimpleNamespace
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


def num_sent(plan, node):
    return len({(layer, expert) for layer, expert, *_ in sent_in(plan, node)})


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


def locked(rank, plans):
    """Bytes that the process page-locks in each step, how often it waits for copies, and bytes that stay locked."""
    registered, waits = {}, []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, _: registered.update({address: size}) or 0,
        cudaHostUnregister=registered.pop,
    )
    stream, found = SimpleNamespace(synchronize=lambda: waits.append("copies")), []
    with ExitStack() as stack:
        stack.enter_context(patch.object(host_memory, "device_of", lambda homes: torch.device("cuda", 0)))
        for name, fake in (
            ("cudart", lambda: cudart),
            ("device", lambda _: nullcontext()),
            ("current_stream", lambda _: stream),
        ):
            stack.enter_context(patch.object(torch.cuda, name, fake))
        with closing(engine_of(plans[0], rank)) as engine:
            for step, plan in enumerate(plans):
                begin(engine, step, plan)
                found.append((sum(registered.values()), len(waits)))
    return found, sum(registered.values())


def test_a_rank_page_locks_what_it_writes_and_reads_and_waits_once_for_all_copies(workers):
    plan = random_plan(0, ranks=4, slots=1)
    for rank, (found, stays) in enumerate(workers(4).run(locked, [plan, plan])):
        used = {(layer, expert) for layer, expert, home, at in sent_in(plan, 0) if rank in (home, at)}
        assert 0 < len(used) < num_sent(plan, 0)
        assert found == [(EXPERT_BYTES * len(used), 1), (EXPERT_BYTES * len(used), 2)]
        assert stays == 0


def close_under_way(rank, plan, queries):
    """What happens when an engine is closed while its stream has not run all it was given."""
    log, engine = [], engine_of(plan, rank)
    begin(engine, 0, plan)
    answers = iter(queries)
    engine._lane.stream = SimpleNamespace(query=lambda: log.append("asked") or next(answers, False))
    with patch.object(engine._memory, "close", lambda: log.append("unlocked")):
        engine.close(seconds=0.05)
    return log


def test_memory_is_unlocked_when_streams_have_run_out_and_left_alone_when_they_do_not(workers):
    plan = random_plan(0, ranks=2)
    for log in workers(2).run(close_under_way, plan, [False, False, True]):
        assert log == ["asked"] * 3 + ["unlocked"]
    for log in workers(2).run(close_under_way, plan, []):
        assert set(log) == {"asked"}

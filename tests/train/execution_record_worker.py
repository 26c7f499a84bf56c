"""What worker processes do whose records of a step are tested.

Steps run beside meters of what the processes really exchange, set where it leaves and arrives.
"""

import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch.distributed as dist

from foreroute.adapters.hf.scoring import response_log_probs
from foreroute.ep.transfer.host_memory import HostMemory
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.planner import PlanInProgress
from foreroute.train import experts
from tests.train.expert_parallel_steps import precise_trainer, steps_of

LOCK = threading.Lock()


@dataclass
class Meters:
    """Of one rank.

    Attributes:
        rows: received in each all-to-all, in order.
        arrived: bytes by "host", "fetching" and "returning".
        planned: what the planner was given and what it made, in order.
    """

    rows: list = field(default_factory=list)
    arrived: dict = field(default_factory=dict)
    planned: list = field(default_factory=list)

    def add(self, way, num_bytes):
        # transfers arrive in threads
        with LOCK:
            self.arrived[way] = self.arrived.get(way, 0) + num_bytes


def metered_steps(rank, config, count):
    meters = Meters()
    with precise_trainer(config) as trainer, metered(meters):
        return steps_of(trainer, count), meters


@contextmanager
def metered(meters):
    exchange_rows, begin, row = dist.all_to_all_single, PeerGroup.begin, HostMemory.row
    start_plan = experts.planner.start
    in_making = []

    def seen_rows(arrived, sent, receive_G, *rest, **options):
        meters.rows.append(sum(receive_G))
        return exchange_rows(arrived, sent, receive_G, *rest, **options)

    def seen_messages(self, sends, receives, what):
        receives = list(receives)
        meters.add(what.split()[0], sum(message.tensor.nbytes for message in receives))
        return begin(self, sends, receives, what)

    def seen_row(self, *args):
        found = row(self, *args)
        meters.add("host", found.nbytes)
        return found

    def seen_plan(counts_MLGE, *given, **options):
        in_making.append((counts_MLGE, start_plan(counts_MLGE, *given, **options)))
        return in_making[-1][1]

    with ExitStack() as stack:
        for place, name, seen in (
            (dist, "all_to_all_single", seen_rows),
            (PeerGroup, "begin", seen_messages),
            (HostMemory, "row", seen_row),
            (experts.planner, "start", seen_plan),
        ):
            stack.enter_context(mock.patch.object(place, name, seen))
        yield
        meters.planned += [(counts_MLGE, progress.result()) for counts_MLGE, progress in in_making]


def steps_with_slow_plans(rank, config, plan_s, forward_s):
    """One step, with a planner and a recompute that take at least so long."""

    start_plan = experts.planner.start

    def slow_plan(*args, **options):
        time.sleep(plan_s)
        return start_plan(*args, **options)

    def slow_forward(*args, **options):
        time.sleep(forward_s if options else 0)
        return response_log_probs(*args, **options)

    with (
        mock.patch.object(experts.planner, "start", slow_plan),
        mock.patch("foreroute.train.loop.response_log_probs", slow_forward),
        precise_trainer(config) as trainer,
    ):
        return steps_of(trainer, 1)


def steps_with_slow_blocks(rank, config, block_s, forward_s):
    """One step, with a planner that takes so long for each block but the first, and forwards as `slow_forward`."""
    add = PlanInProgress.add

    def slow_add(self, hosts, figures_ML2, begin, layer):
        time.sleep(block_s if begin else 0)
        add(self, hosts, figures_ML2, begin, layer)

    def slow_forward(*args, **options):
        time.sleep(forward_s if options else 0)
        return response_log_probs(*args, **options)

    with (
        mock.patch.object(PlanInProgress, "add", slow_add),
        mock.patch("foreroute.train.loop.response_log_probs", slow_forward),
        precise_trainer(config) as trainer,
    ):
        return steps_of(trainer, 1)

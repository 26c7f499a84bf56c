"""What worker processes do whose records of a step are tested.

Steps run beside meters of what the processes really exchange, set where it leaves and arrives; and kernels are listed
in a process where nothing was planned before.
"""

import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch.distributed as dist
from numba.core.dispatcher import Dispatcher

from foreroute.ep.transfer.host_memory import HostMemory
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import PlanInProgress
from foreroute.train import stage_planner
from foreroute.train.passes import response_logprobs
from foreroute.train.stage_planner import Planning, StagePlanner, begin_plan, compile_planner
from tests.plan.random_plans import LINKS
from tests.planner.test_options import COSTS
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

    def seen_plan(planning, counts_MLGE, home_LE):
        in_making.append((counts_MLGE, begin_plan(planning, counts_MLGE, home_LE)))
        return in_making[-1][1]

    with ExitStack() as stack:
        for place, name, seen in (
            (dist, "all_to_all_single", seen_rows),
            (PeerGroup, "begin", seen_messages),
            (HostMemory, "row", seen_row),
            (stage_planner, "begin_plan", seen_plan),
        ):
            stack.enter_context(mock.patch.object(place, name, seen))
        yield
        meters.planned += [(counts_MLGE, progress.result()) for counts_MLGE, progress in in_making]


def steps_with_slow_plans(rank, config, plan_s, forward_s):
    """One step, with a planner and a recompute that take at least so long."""

    def slow_plan(*args):
        time.sleep(plan_s)
        return begin_plan(*args)

    def slow_forward(*args):
        time.sleep(forward_s)
        return response_logprobs(*args)

    with (
        mock.patch.object(stage_planner, "begin_plan", slow_plan),
        mock.patch("foreroute.train.passes.response_logprobs", slow_forward),
        precise_trainer(config) as trainer,
    ):
        return steps_of(trainer, 1)


def steps_with_slow_blocks(rank, config, block_s, forward_s):
    """One step, with a planner that takes so long for each block but the first, and forwards as `slow_forward`."""
    add = PlanInProgress.add

    def slow_add(self, hosts, figures_ML2, begin, layer):
        time.sleep(block_s if begin else 0)
        add(self, hosts, figures_ML2, begin, layer)

    def slow_forward(*args):
        time.sleep(forward_s)
        return response_logprobs(*args)

    with (
        mock.patch.object(PlanInProgress, "add", slow_add),
        mock.patch("foreroute.train.passes.response_logprobs", slow_forward),
        precise_trainer(config) as trainer,
    ):
        return steps_of(trainer, 1)


def compiled():
    """Which kernels of the planner are compiled, and for which types."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("foreroute.planner", "foreroute.plan", "foreroute.costs"))
    ]
    kernels = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, Dispatcher)}
    return {(f.__qualname__, str(signature)) for f in kernels.values() for signature in f.signatures}


def compiled_before_and_after_plans(rank):
    """What is compiled at first, after `compile_planner`, and after plans as runs make them."""
    before, seen = compiled(), []
    for costs in (None, COSTS):
        for slots, per_node in (("layer", 4), ("shared", 2)):
            options = PlanOptions(slots=slots, home_moves=4)
            planning = Planning(Topology(4, per_node, 2, LINKS), options, costs)
            compile_planner(planning)
            ready = compiled()
            counts_MLGE = np.random.default_rng(0).poisson(3, (3, 2, 4, 16)).astype(np.int32)
            homes_LE = np.tile(planning.topology.contiguous_home_E(16), (2, 1))
            begin_plan(planning, counts_MLGE, homes_LE).result()
            StagePlanner(planning).homes(counts_MLGE, homes_LE)
            seen.append((ready, compiled()))
    return before, seen

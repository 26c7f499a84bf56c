"""Bytes that several ranks record of a step, beside meters of what the processes really exchange, where it arrives."""

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import pytest

from foreroute.ep.transfer.host_memory import HostMemory
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.train import experts
from tests.train.expert_parallel_steps import config_of, precise_trainer, steps_of
from tests.train.small_runs import SIZES

pytestmark = pytest.mark.slow

RANKS, LOCK = 2, threading.Lock()
# gate and up, and down, in float64
EXPERT_BYTES = 8 * 3 * SIZES["hidden_size"] * SIZES["moe_intermediate_size"]


@dataclass
class Meters:
    """Of one rank: bytes that arrived by way, and what the planner made."""

    arrived: dict = field(default_factory=dict)
    planned: list = field(default_factory=list)

    def add(self, way, num_bytes):
        # transfers arrive in threads
        with LOCK:
            self.arrived[way] = self.arrived.get(way, 0) + num_bytes


def metered_steps(rank, config, count):
    meters = Meters()
    with precise_trainer(config) as trainer, metering(meters):
        return steps_of(trainer, count), meters


@contextmanager
def metering(meters):
    def bytes_of(tensors):
        return sum(tensor.nbytes for tensor in tensors)

    # what is noted of a call, given what it returns and its arguments
    notes = {
        (PeerGroup, "post"): lambda _, group, sends, receives, what: meters.add(
            what.split()[0], bytes_of(tensor for *_, tensor in receives)
        ),
        (HostMemory, "expert"): lambda found, *_: meters.add("host", bytes_of(found.values())),
        (experts.planner, "plan_and_why"): lambda made, *_: meters.planned.append(made[0]),
    }

    def noting(real, note):
        def call(*given, **options):
            result = real(*given, **options)
            note(result, *given)
            return result

        return call

    with ExitStack() as stack:
        for (place, name), note in notes.items():
            stack.enter_context(mock.patch.object(place, name, noting(getattr(place, name), note)))
        yield


@pytest.mark.parametrize("paths", ["host", "direct"])
def test_bytes_are_those_that_arrived(paths, workers):
    outcomes = workers(RANKS).run(metered_steps, config_of(RANKS, mini_steps=2, paths=paths), 1)
    record, meters = outcomes[0][0].records[0]["execution"], [each for _, each in outcomes]
    arrived = [sum(each.arrived.get(way, 0) for each in meters) for way in ("host", "fetching", "returning")]
    assert [record["bytes"][way] for way in ("host", "direct", "gradients")] == arrived
    assert (arrived[0] > 0, arrived[1] > 0) == (paths == "host", paths == "direct")
    of_update = sum(len(plan.hosts.expert_R) for plan in meters[0].planned[1:])
    assert record["bytes"]["gradients"] == EXPERT_BYTES * of_update > 0
    assert arrived[0] + arrived[1] <= EXPERT_BYTES * record["replicas"]

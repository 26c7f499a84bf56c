"""What several ranks record of a step: each figure against what the processes exchanged, or counted anew.

Steps run beside meters of what the processes really exchange, set where it leaves and arrives.
"""

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest

from foreroute.ep.dispatch import ExchangeRows
from foreroute.ep.transfer.host_memory import HostMemory
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.train import experts
from tests.train.expert_parallel_steps import config_of, precise_trainer, steps_of
from tests.train.small_runs import SIZES

LOCK = threading.Lock()


@dataclass
class Meters:
    """Of one rank: rows that each all-to-all received, bytes by way, and what the planner was given and made."""

    rows: list = field(default_factory=list)
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
        (ExchangeRows, "apply"): lambda arrived, *_: meters.rows.append(len(arrived)),
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


RANKS, LAYERS = 2, SIZES["num_hidden_layers"]


@pytest.fixture(scope="module", params=["host", pytest.param("direct", marks=pytest.mark.slow)])
def metered(request, workers):
    config = config_of(RANKS, mini_steps=2, paths=request.param)
    outcomes = workers(RANKS).run(metered_steps, config, 1)
    return outcomes[0][0].records[0]["execution"], [meters for _, meters in outcomes]


def test_executed_rows_are_those_that_arrived(metered):
    record, meters = metered
    passes = record["passes"]
    assert passes.keys() == {"recompute", "update 0", "update 1"}
    arrived_GX = np.array([each.rows for each in meters])
    # to the experts of each layer and back; the measured pass without replay has no plan
    there_GX = arrived_GX.reshape(RANKS, -1, 2)[..., 0]
    for stage in passes.values():
        cells, there_GX = np.split(there_GX, [len(stage["executed_MLG"]) * LAYERS], axis=1)
        assert np.moveaxis(cells.reshape(RANKS, -1, LAYERS), 0, 2).tolist() == stage["executed_MLG"]
    assert there_GX.size == 0


def test_balance_and_replicas_are_those_of_the_stages(metered):
    record, meters = metered
    assert record["max_over_mean"]["planned"] == record["max_over_mean"]["executed"]
    for kind in ("executed", "at_home"):
        cells = [cell for stage in record["passes"].values() for layers in stage[f"{kind}_MLG"] for cell in layers]
        busiest, mean = sum(max(cell) for cell in cells), sum(sum(cell) / RANKS for cell in cells)
        assert record["max_over_mean"][kind] == pytest.approx(busiest / mean)
    assert record["max_over_mean"]["executed"] < record["max_over_mean"]["at_home"]
    assert record["replicas"] == sum(len(plan.hosts.expert_R) for plan in meters[0].planned) > 0


def test_bytes_are_those_that_arrived(metered, request):
    record, meters = metered
    arrived = [sum(each.arrived.get(way, 0) for each in meters) for way in ("host", "fetching", "returning")]
    assert [record["bytes"][way] for way in ("host", "direct", "gradients")] == arrived
    by_host = request.node.callspec.params["metered"] == "host"
    assert (arrived[0] > 0, arrived[1] > 0) == (by_host, not by_host)

"""What a cell fetches, by which path, and what returns: by hand on a tiny step of two nodes."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.plan import Links, PlanOptions, Topology
from foreroute.plan.hosts import CellPlan, Hosts
from foreroute.plan.schedule import ExecutionSchedule
from foreroute.planner import plan
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.ep_group import pass_work

TOPOLOGY = Topology(4, 2, 1, Links(340e9, 45e9, 50e9, 20e-6, 50e-6))
COSTS = CostModel(model=MODELS["qwen3-30b-a3b"], hardware=HARDWARE["h100"])
HOME_E = np.arange(4)
LAYERS, COUNTS = np.arange(2), np.ones((3, 2, 4, 4), np.int32)
BYTES = 3 * 2048 * 768
# (expert, rank, fetched) of the replicas of both layers, micro-step by micro-step
REPLICAS = [[(1, 0, True)], [(1, 0, False)], [(3, 0, True)]]


def planned(slots):
    cells = []
    for replicas in REPLICAS:
        expert_R, rank_R, fetched_R = map(np.array, zip(*replicas, strict=True))
        cells += 2 * [CellPlan(HOME_E, expert_R, rank_R, 0 * rank_R, fetched_R, np.ones((1, 4), np.int32))]
    return Hosts.of_cells(np.tile(HOME_E, (2, 1)), cells), slots


def transfers(served, layers, costs, topology=TOPOLOGY, counts=COUNTS):
    """Of the recompute, and of the update."""
    hosts, slots = served
    update = pass_work(hosts, slots, BalancerInput(counts, topology, hosts.home_LE), layers, topology, costs)
    return update.forward_alone(), update


def arrivals(moved):
    """bool [K, M, L]: something is fetched for the cell."""
    return moved.host_KMLG.any(axis=3) | moved.direct_KMLG4.any(axis=(3, 4))


def test_slots_of_a_layer_keep_what_they_hold():
    for moved in transfers(planned("layer"), LAYERS, replace(COSTS, prefetch=0)):
        assert arrivals(moved).tolist() == [[[True] * 2, [False] * 2, [True] * 2], [[False] * 2] * 3]


@pytest.mark.parametrize(("prefetch", "fetched_back"), [(0, [True, False]), (1, [False, False])])
def test_shared_slots_still_hold_the_last_cells_where_the_way_turns_back(prefetch, fetched_back):
    costs = replace(COSTS, paths="direct", prefetch=prefetch)
    recompute, update = transfers(planned("shared"), LAYERS, costs)
    assert arrivals(recompute).tolist() == [[[True, True]] * 3, [[False, False]] * 3]
    assert arrivals(update).tolist() == [[[True, True]] * 3, [fetched_back] * 3]
    assert np.array_equal(update.direct_KMLG4[0], recompute.direct_KMLG4[0])
    assert np.array_equal(update.direct_KMLG4[1, :, fetched_back], update.direct_KMLG4[0, :, fetched_back])


@pytest.mark.parametrize("paths", ["host", "direct"])
def test_replicas_take_the_paths_of_the_executors_schedule(paths):
    topology, rng = replace(TOPOLOGY, num_ranks=8, ranks_per_node=4, redundant_slots=3), np.random.default_rng(3)
    counts = rng.multinomial(2000, rng.dirichlet(np.full(32, 0.1), (2, 3, 1)), (2, 3, 8)).astype(np.int32)
    found = plan(counts, topology, PlanOptions(slots="shared"))
    assert found.num_replicas_ML.min() > 4
    costs, num_bytes, links = replace(COSTS, paths=paths), COSTS.model.expert_bytes, topology.links
    moved = transfers((found.hosts, "shared"), np.arange(3), costs, topology, counts)[0]
    by_host = moved.host_KMLG[0] * links.host_bytes_per_s / num_bytes
    executed, served, near = np.zeros_like(by_host), np.zeros_like(by_host), np.zeros_like(by_host)
    for rank in range(8):
        schedule = ExecutionSchedule(found, counts, rank, paths=paths)
        for c in np.ndindex(2, 3):
            moves = schedule.cell(*c).hosted
            executed[(*c, rank)], served[(*c, rank)] = moves["by_host"].sum(), len(moves)
            near[(*c, rank)] = (moves["peer"] // 4 == rank // 4).sum()
    np.testing.assert_allclose(by_host, executed, rtol=1e-9)
    assert np.array_equal(executed, near * (paths == "host"))
    assert 0 < near.sum() < served.sum()
    arriving = moved.direct_KMLG4[0][..., [1, 3]] / num_bytes * [links.cluster_bytes_per_s, links.node_bytes_per_s]
    np.testing.assert_allclose(arriving.sum(axis=-1), served - executed, rtol=1e-9)

"""What a cell fetches, by which path, and what returns; homes that move once a step, and sequences packed for them."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness.planner_oracles import CellHosts
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.plan import Links, PlanOptions, Topology
from foreroute.plan.hosts import CellPlan, Hosts
from foreroute.plan.schedule import ExecutionSchedule
from foreroute.planner import plan
from foreroute.planner.homes import place_homes
from foreroute.simulate import parse_config, simulate
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.ep_group import EPGroup, pass_work
from foreroute.simulate.methods import METHODS, serve
from foreroute.simulate.optimizer_step import reduction_bytes
from foreroute.simulate.steps import group_steps
from tests.simulate.simulate_cases import small_config

TOPOLOGY = Topology(4, 2, 1, Links(340e9, 45e9, 50e9, 20e-6, 50e-6))
COSTS = CostModel(model=MODELS["qwen3-30b-a3b"], hardware=HARDWARE["h100"])
HOME_E = np.arange(4)
LAYERS, COUNTS = np.arange(2), np.ones((3, 2, 4, 4), np.int32)
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


@pytest.mark.parametrize(("prefetch", "fetched_back"), [(0, [True, False]), (1, [False, False])])
def test_slots_keep_what_they_hold_and_shared_ones_the_last_cells_where_the_way_turns_back(prefetch, fetched_back):
    for moved in transfers(planned("layer"), LAYERS, replace(COSTS, prefetch=0)):
        assert arrivals(moved).tolist() == [[[True] * 2, [False] * 2, [True] * 2], [[False] * 2] * 3]
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


RANKS, NODE, STEP_LAYERS = 16, 8, 3


def config_of(method, paths="host"):
    return parse_config(
        {
            "cluster": {"gpus": 32, "expert_parallel": RANKS, "redundant_slots": 2},
            "hardware": {"preset": "h100"},
            "model": {"preset": "qwen3-30b-a3b"},
            "costs": {"dispatcher": "copies", "paths": paths, "prefetch": 0},
            "workload": {"tokens_per_rank": 1024, "micro_steps": 2, "layers": STEP_LAYERS},
            "methods": ["static", method],
        },
        source="the test",
    )


@pytest.mark.parametrize(("paths", "slots"), [("host", "shared"), ("direct", "layer")])
def test_rows_and_replicas_are_those_that_counting_finds(paths, slots, monkeypatch):
    preset = METHODS["foreroute_traffic"]
    options = replace(preset.method.options, slots=slots, pay_off=False)  # so that both passes run by the plan
    monkeypatch.setitem(METHODS, "foreroute_traffic", replace(preset, method=replace(preset.method, options=options)))
    config = config_of("foreroute_traffic", paths)
    cluster = config.described()
    record = simulate(config)
    for step in group_steps(config, cluster.topology, cluster.costs):
        planned = serve(METHODS["foreroute_traffic"], step, cluster.costs)
        assert planned.slots == slots
        rows, weights, gradients = np.zeros(2), np.zeros(3), np.zeros(2)
        for m, layer in np.ndindex(step.counts_MLGE.shape[:2]):
            one = CellHosts.of(planned.passes[1].cell(m, layer), step.counts_MLGE[m, layer])
            times = sum(model_layer % STEP_LAYERS == layer for model_layer in range(48))
            hosts = zip(one.expert_H, one.rank_H, one.tokens_HG, one.fetched_H, strict=True)
            for expert, host, tokens_G, fetched in hosts:
                for source, tokens in enumerate(tokens_G):
                    if source != host:
                        rows[int(source // NODE != host // NODE)] += times * tokens
                home = planned.home_LE[layer, expert]
                if host == home:
                    continue
                far = int(host // NODE != home // NODE)
                # recompute, forward, and backward, which finds replicas in slots of their own or of the last layer
                fetches = 2 * times * fetched if slots == "layer" else 3 * times - (layer == 47 % STEP_LAYERS)
                weights[0 if paths == "host" and not far else 1 + far] += fetches
                gradients[far] += times
        found = EPGroup.of(planned, step, cluster.costs, overlap=0.0).moved_bytes()
        assert weights.any()
        assert gradients.any()
        expected = {
            "rows": dict(zip(("node", "cluster"), rows * 8 * 2048 * 2 / RANKS, strict=True)),
            "weights of replicas": dict(
                zip(("host", "node", "cluster"), weights * 3 * 2048 * 768 * 2 / RANKS, strict=True)
            ),
            "gradients of replicas": dict(
                zip(("node", "cluster"), gradients * 3 * 2048 * 768 * 4 / RANKS, strict=True)
            ),
        }
        for what, by_link in expected.items():
            assert found[what] == pytest.approx(by_link), what
    static = record["static"].moved_bytes
    assert not any(static["weights of replicas"].values())
    assert not any(static["gradients of replicas"].values())
    reduced = reduction_bytes(config.cluster, cluster.topology, cluster.costs)
    assert static["gradients and weights of data parallelism"] == reduced


@pytest.fixture(scope="module")
def drawn():
    config = small_config(gpus=8, micro_steps=6, groups=2)
    cluster = config.described()
    return list(group_steps(config, cluster.topology, cluster.costs)), cluster


def served(name, step, cluster):
    found = serve(METHODS[name], step, cluster.costs)
    assert all(len(hosts.expert_R) == 0 for hosts in found.passes)
    return found


def slowest(counts_MLGE, home_LE):
    """By the definition: the sum over cells of the slowest rank."""
    total = 0
    for counts_LGE in counts_MLGE:
        for counts_GE, home_E in zip(counts_LGE, home_LE, strict=True):
            loads = [0] * len(counts_GE)
            for expert, home in enumerate(home_E):
                loads[home] += int(counts_GE[:, expert].sum())
            total += max(loads)
    return total


def test_homes_of_this_step_move_once_and_level_it(drawn):
    for step in drawn[0]:
        found = served("foreroute_homes", step, drawn[1])
        assert np.array_equal(found.before_LE, step.home_LE)
        assert found.home_moves == (found.home_LE != step.home_LE).sum() > 0
        # the same tokens: layers and experts get the same in all, and no rank more than one had
        assert np.array_equal(found.counts_MLGE.sum(axis=(0, 2)), step.counts_MLGE.sum(axis=(0, 2)))
        most = step.counts_MLGE.sum(axis=3).max()
        assert found.counts_MLGE.sum(axis=3).max() <= most
        assert found.squares_MG.sum() == step.squares_MG.sum()
        placed_LE = place_homes(step.counts_MLGE, step.topology, step.home_LE)
        levels = [
            slowest(found.counts_MLGE, found.home_LE),
            slowest(step.counts_MLGE, placed_LE),
            slowest(step.counts_MLGE, step.home_LE),
        ]
        assert levels[0] < levels[1] < levels[2]
        loads_MLG = found.loads(step.topology).served_SMLG[0]
        assert loads_MLG.max(axis=2).sum() == levels[0]


def test_homes_of_the_step_before_move_nothing_and_are_those_that_levelled_it(drawn):
    for step in drawn[0]:
        found = served("foreroute_homes_previous", step, drawn[1])
        of_counts = replace(step, sequences=None, previous_sequences=None)
        assert found.home_moves == served("foreroute_homes_previous", of_counts, drawn[1]).home_moves == 0
        assert np.array_equal(found.home_LE, step.previous_sequences().with_homes(step.topology, step.home_LE)[1])
        assert slowest(found.counts_MLGE, found.home_LE) < slowest(step.counts_MLGE, found.home_LE)

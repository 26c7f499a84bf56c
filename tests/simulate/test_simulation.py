"""Whole simulations: closed forms, agreement with the planner's cost model, and what must hold of every method."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.balancers import OTHER_BALANCERS
from foreroute.costs.model import BACKWARD, FORWARD
from foreroute.costs.pricing import least_seconds, step_parts
from foreroute.simulate import parse_config, simulate
from foreroute.simulate.engine import PARTS
from foreroute.simulate.ep_group import EPGroup
from foreroute.simulate.methods import METHODS, all_at_home, forced_balance, serve
from foreroute.simulate.optimizer_step import move_seconds, optimizer_seconds, reduction_seconds
from foreroute.simulate.steps import group_steps
from tests.simulate.simulate_cases import small_config


def first_step(config):
    cluster = config.described()
    return next(iter(group_steps(config, cluster.topology, cluster.costs))), cluster


def group_of(config, counts):
    """A group that serves these counts at home."""
    step, cluster = first_step(config)
    step = replace(step, counts_MLGE=counts, home_LE=step.home_LE[: counts.shape[1]], squares_MG=None)
    return EPGroup.of(all_at_home(step), step, cluster.costs, overlap=0.0), cluster


def by_hand(cluster, tokens, load, leg_s, one=FORWARD):
    """A pass over a cell whose slowest rank has so many tokens, and as many assignments on each of its experts."""
    attention_s = cluster.costs.attention_seconds(np.array(tokens), one=one)
    experts_s = cluster.costs.expert_seconds(np.asarray(load), one).sum()
    return float(attention_s + experts_s) + 2 * leg_s + cluster.costs.hardware.layer_s


def step_by_hand(cluster, tokens, load, leg_s):
    """Recompute and update of M equal micro-steps."""
    layers = cluster.costs.model.num_layers
    forward_s, backward_s = (by_hand(cluster, tokens, load, leg_s, one) for one in (FORWARD, BACKWARD))
    head_s = float(cluster.costs.head_seconds(np.array(tokens)))
    recompute_s = layers * forward_s + head_s
    return recompute_s, layers * (2 * forward_s + backward_s) + 3 * head_s


UNIFORM, ONE_HOT = np.full((2, 2, 4, 8), 128, np.int32), np.zeros((1, 2, 4, 8), np.int32)
ONE_HOT[..., 3] = 1000


@pytest.mark.parametrize(
    ("ranks", "counts_MLGE", "assignments", "loads", "crossing"),
    [
        (1, UNIFORM[:, :, :1], 1024, [128] * 8, 0),
        # a rank sends 3/4 of 1,024 rows over the one link that all share, and each of its experts gets 4 * 128
        (4, UNIFORM, 1024, [512, 512], 768),
        (4, ONE_HOT, 1000, [4000], 3000),
    ],
    ids=["one rank alone", "uniform", "one hot expert"],
)
def test_a_step_costs_what_its_slowest_rank_costs_by_hand(ranks, counts_MLGE, assignments, loads, crossing):
    config = small_config(gpus=ranks, expert_parallel=ranks)
    group, cluster = group_of(config, counts_MLGE)
    leg_s = crossing * cluster.costs.model.row_bytes / cluster.topology.links.node_bytes_per_s + 20e-6
    expected = step_by_hand(cluster, assignments / cluster.costs.model.top_k, loads, leg_s)
    for run, seconds in zip(group.run(), expected, strict=True):
        assert run.end_s == pytest.approx(len(counts_MLGE) * seconds)


@pytest.mark.parametrize("method", ["static", "foreroute", "eplb_micro_step"])
@pytest.mark.parametrize("dispatcher", ["dedup", "copies"])
def test_without_transfers_and_overlap_it_is_the_planners_cost_model(method, dispatcher):
    config = small_config(
        costs={"dispatcher": dispatcher, "sequence_tokens": 500.0}, gpus=16, expert_parallel=16, experts=32
    )
    step, cluster = first_step(config)
    step = replace(step, squares_MG=None)
    planned = serve(METHODS[method], step, cluster.costs)
    group = EPGroup.of(planned, step, cluster.costs, overlap=0.0)
    recompute, update = (work.without_transfers() for work in (group.recompute, group.update))
    group = replace(group, recompute=recompute, update=update)
    counts = np.ascontiguousarray(step.counts_MLGE, np.int32)
    parts = [
        step_parts(hosts, counts, cluster.topology, cluster.costs)[s, :4] for s, hosts in enumerate(planned.passes)
    ]
    for run, expected in zip(group.run(), parts, strict=True):
        assert run.parts_X[:4] == pytest.approx(2 * expected)  # two layers stand for four
    head_s = sum(float(run.parts_X[PARTS.index("output head")]) for run in group.run())
    least_s = least_seconds(step.counts_MLGE, cluster.topology, cluster.costs).sum()
    bound = group.bound().run()
    assert sum(run.end_s for run in bound) == pytest.approx(2 * least_s + head_s)


def test_no_method_beats_the_bound_and_parts_add_up():
    config = small_config(gpus=64, expert_parallel=16, experts=32, methods=METHODS, micro_steps=2, groups=2)
    found = simulate(config, balancers={"llep": OTHER_BALANCERS["llep"]})
    assert len(found.methods) == 11
    assert 0 < found.bound_s < found.forced_balance_s
    for record in found.methods:
        assert 0 < record.share_of_bound <= 1
        for parts, name in ((record.recompute_parts, "recompute"), (record.update_parts, "update")):
            seconds = sum(parts.values()) - parts["waiting for the plan"]
            assert seconds == pytest.approx(getattr(record.phases, name))
        assert record.share_of_forced_balance == pytest.approx(found.forced_balance_s / record.training_s)
        assert record.gpu_hours == pytest.approx(record.step_s * 64 / 3600)
        assert record.gpu_hours_saved == pytest.approx(found["static"].gpu_hours - record.gpu_hours)
        assert record.as_dict()["phases"]["recompute"] == record.phases.recompute
    # replicas that do not pay are dropped from both, so that neither is the more level
    assert max(found["foreroute_exact"].imbalance, found["foreroute"].imbalance) < found["static"].imbalance
    # between nodes a plan leaves more to the slowest rank where that keeps tokens in their node
    assert found["foreroute"].training_s < found["eplb_previous"].training_s
    assert found["foreroute"].training_s < found["static"].training_s


def test_forced_balance_keeps_what_every_source_sends_and_levels_every_expert():
    problem, _ = first_step(small_config(gpus=16, expert_parallel=16, experts=32))
    forced = forced_balance(problem)
    assert all(len(hosts.expert_R) == 0 for hosts in forced.passes)
    for even_GE, (_, counts_GE) in zip(forced.counts_MLGE.reshape(-1, 16, 32), problem.cells(), strict=True):
        assert np.array_equal(even_GE.sum(axis=1), counts_GE.sum(axis=1))
        assert np.ptp(even_GE.sum(axis=0)) <= 1
        assert np.ptp(even_GE, axis=1).max() <= 1


def test_the_recompute_waits_for_what_of_planning_does_not_come_before_it(monkeypatch):
    hidden = simulate(small_config(planning_s=0.0))["foreroute"]
    assert hidden.phases.planning == 0
    for lead_s, expected_s in ((0.0, 1e3), (400.0, 600.0), (2e3, 0.0)):
        waited = simulate(small_config(planning_s=1e3, plan_lead_s=lead_s))["foreroute"]
        assert waited.phases.planning == pytest.approx(expected_s)
        assert waited.training_s == pytest.approx(hidden.training_s)
    # two layers are planned, in a second, for four
    timed = "foreroute.simulate.simulation.serve"
    monkeypatch.setattr(timed, lambda *given, **how: replace(serve(*given, **how), planning_s=1.0))
    assert simulate(small_config(planning_s=None))["foreroute"].planning_s == 2


EXPERT = 3 * 2048 * 768
DENSE = 48 * 2 * 2048 * 128 * 36 + 151_936 * 2048
DENSE_S = DENSE * (4 + 2) * (7 / 8 / 340e9 + 7 / 8 / 8 / 45e9)


def described(ranks, gpus=64):
    config = parse_config({"cluster": {"gpus": gpus, "expert_parallel": ranks}}, source="the test")
    cluster = config.described()
    return config.cluster, cluster.topology, cluster.costs


@pytest.mark.parametrize(
    ("ranks", "gpus", "seconds"),
    [
        # four ranks on as many nodes have the same 8 experts of a layer
        (16, 64, DENSE_S + 48 * 8 * EXPERT * (4 + 2) * 3 / 4 / 45e9),
        # one group reduces no experts, and one GPU nothing
        (64, 64, DENSE_S),
        (1, 1, 0),
        # two of the 16 replicas are in each node, and reduced inside of it first
        (4, 64, DENSE_S + 48 * 32 * EXPERT * (4 + 2) * (1 / 2 / 340e9 + 7 / 8 / 2 / 45e9)),
    ],
)
def test_gradients_are_reduced_in_the_node_first(ranks, gpus, seconds):
    assert reduction_seconds(*described(ranks, gpus)) == pytest.approx(seconds)


def test_the_optimizer_reads_and_writes_its_share():
    parameters = DENSE / 64 + 48 * 8 * EXPERT / 4
    assert optimizer_seconds(*described(16)) == pytest.approx(parameters * 30 / 2.7e12)


def test_homes_move_with_their_state_over_the_busiest_link():
    _, topology, costs = described(16)
    before_LE = np.array([[0, 0, 5], [2, 2, 2]])
    home_LE = np.array([[0, 3, 3], [2, 2, 8]])  # two into rank 3 of the node, one to the other node
    size = EXPERT * 14
    near_s, far_s = 2 * size / 340e9, size / 45e9
    assert move_seconds(before_LE, home_LE, 12.0, topology, costs) == pytest.approx(12 * max(near_s, far_s))
    assert move_seconds(before_LE[:1], home_LE[:1], 1.0, topology, costs) == pytest.approx(near_s)
    assert move_seconds(home_LE, home_LE, 1.0, topology, costs) == 0

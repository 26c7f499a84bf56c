"""Workloads W0 to W7 and their oracle: against published figures, and what is broken."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness import token_imbalance
from benchmarks.harness.token_imbalance import WORKLOADS, Setting, failed_checks, routes, sources, step_counts
from foreroute.plan import PlanOptions, Topology, verify
from foreroute.planner import plan
from tests.plan.random_plans import LINKS

SEED = 1234
SMALL, LARGE = Setting(8, 2, 128, 4), Setting(8, 4, 512, 4)
PUBLISHED = {  # largest load of an expert over the mean, and coefficient of variation: 128 tokens top-2, 512 top-4
    "W0_balanced": (1.000, 0.000, 1.000, 0.000),
    "W1_hot_expert_set": (3.312, 1.309, 1.781, 0.744),
    "W2_hot_rank": (3.219, 1.272, 1.770, 0.747),
    "W4_source_ragged": (1.281, 0.141, 1.086, 0.046),
    "W5_zero_expert_rank": (2.156, 1.007, 2.000, 1.000),
    "W6_rotating_hotspot": (3.312, 1.319, 1.770, 0.742),
    "W7_burst": (1.219, 0.126, 1.066, 0.040),
}


def steps(name, setting, count=12):
    return step_counts(name, setting, range(count), SEED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_loads_of_experts_are_those_that_are_published(name):
    for setting, expected in ((SMALL, PUBLISHED[name][:2]), (LARGE, PUBLISHED[name][2:])):
        loads_E = steps(name, setting, 1).sum(axis=(0, 1, 2))
        found = loads_E.max() / loads_E.mean(), loads_E.std() / loads_E.mean()
        assert [f"{value:.3f}" for value in found] == [f"{value:.3f}" for value in expected]


def test_hot_experts_spread_move_and_burst_as_the_names_say():
    """In what no figure is published of: the one that the page defines otherwise, and later steps."""
    loads = {name: steps(name, SMALL).sum(axis=(1, 2)) for name in WORKLOADS}  # by step and expert
    spread = loads["W3_spread_hot_experts"]
    assert (spread[:, ::2].min(axis=1) > spread[:, 1::2].max(axis=1)).all()
    hottest = loads["W6_rotating_hotspot"].argmax(axis=1) // 2
    assert hottest.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    burst = loads["W7_burst"].max(axis=1) / 128
    assert (burst[3::4] > 2).all()
    assert (np.delete(burst, [3, 7, 11]) < 1.5).all()
    ragged = steps("W4_source_ragged", SMALL)
    assert (ragged.sum(axis=3) == 2 * np.array([51, 102, 154, 205])).all()


@pytest.mark.parametrize("name", WORKLOADS)
def test_plans_with_two_slots_are_level_and_pass_the_oracle(name):
    for setting in (SMALL, replace(SMALL, num_ranks=2), LARGE):
        counts = steps(name, setting)
        options = PlanOptions(tolerance=0.0)
        found = plan(counts, Topology(setting.num_ranks, setting.num_ranks, 2, LINKS), options)
        verify(found, counts, options)
        assert (found.max_load_ML == setting.tokens * setting.top_k).all()
        ids_TK = routes(name, setting.num_experts, setting.top_k, setting.tokens, 3, SEED)
        everyone = np.tile(ids_TK, (setting.num_ranks, 1)), sources(name, setting.tokens, setting.num_ranks)
        assert failed_checks(found.cell(3, 0), *everyone, setting) == []


def test_the_oracle_finds_rows_that_go_astray(monkeypatch):
    counts = steps("W1_hot_expert_set", SMALL)
    cell = plan(counts, Topology(4, 4, 2, LINKS), PlanOptions(tolerance=0.0)).cell(0, 0)
    ids_TK = np.tile(routes("W1_hot_expert_set", 8, 2, 128, 0, SEED), (4, 1))
    source_T = sources("W1_hot_expert_set", 128, 4)
    for place, value, check in (((0, 0), ids_TK[0, 1], "distinct_topk_ok"), ((0, 1), 8, "id_range_ok")):
        broken = ids_TK.copy()
        broken[place] = value
        assert failed_checks(cell, broken, source_T, SMALL) == [check]
    schedule = token_imbalance.CellSchedule.of

    def astray(*arguments):
        right = schedule(*arguments)
        return replace(right, return_segments=right.return_segments[::-1])

    monkeypatch.setattr(token_imbalance.CellSchedule, "of", astray)
    assert failed_checks(cell, ids_TK, source_T, SMALL) == ["roundtrip_exact"]

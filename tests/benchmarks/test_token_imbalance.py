"""Workloads W0 to W7 and their oracle: against published figures, and what is broken."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness import token_imbalance
from benchmarks.harness.token_imbalance import Setting, failed_checks, routes, sources, step_counts
from foreroute.plan import PlanOptions, Topology
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


def test_the_oracle_finds_rows_that_go_astray(monkeypatch):
    counts = steps("W1_hot_expert_set", SMALL)
    cell = plan(counts, Topology(4, 4, 2, LINKS), PlanOptions(tolerance=0.0)).cell(0, 0)
    ids_TK = np.tile(routes("W1_hot_expert_set", 8, 2, 128, 0, SEED), (4, 1))
    source_T = sources("W1_hot_expert_set", 128, 4)
    assert failed_checks(cell, ids_TK, source_T, SMALL) == []
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

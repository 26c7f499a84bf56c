"""The planner's door: plans of random workloads are valid, and equal for any number of threads."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.errors import CountsError, TopologyError
from foreroute.plan import PlanOptions, Topology
from foreroute.plan.checker import verify
from foreroute.plan.plan_file import plan_to_bytes
from foreroute.planner import plan
from tests.plan.random_plans import LINKS, skewed_counts
from tests.planner.plan_digests import RECORDED, digest, random_case


@pytest.mark.parametrize("slots", ["layer", "shared"])
@pytest.mark.parametrize("tolerance", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("redundant", [0, 1, 3])
def test_plans_of_random_workloads_are_valid(slots, tolerance, redundant):
    options = PlanOptions(tolerance=tolerance, slots=slots)
    for seed in range(30):
        ranks = (2, 4, 8)[seed % 3]
        counts = skewed_counts(seed, (3, 2, ranks, 16), 0.1 + seed % 4)
        verify(plan(counts, Topology(ranks, ranks // (1 + seed % 2), redundant, LINKS), options), counts, options)


def test_threads_do_not_change_the_plan():
    counts = skewed_counts(5, (9, 5, 4, 16))
    topology = Topology(4, 2, 1, LINKS)
    found = [plan(counts, topology, PlanOptions(tolerance=0.0, threads=threads)) for threads in (1, 2, 7)]
    assert len(set(map(plan_to_bytes, found))) == 1


def test_bad_input_is_refused():
    topology = Topology(4, 2, 1, LINKS)
    counts = skewed_counts(5, (2, 1, 4, 16))
    with pytest.raises(CountsError, match="source ranks"):  # as check_counts, see tests/plan/test_counts.py
        plan(counts[:, :, :2], topology)
    with pytest.raises(TopologyError, match=r"4.*rank"):
        plan(counts, topology, home_LE=np.zeros((1, 16), np.int64))


def test_plans_are_those_of_the_record():
    """Every bit of the 65 random plans that are recorded."""
    recorded = dict(line.rsplit(" ", 1) for line in RECORDED.read_text().splitlines())
    assert len(recorded) == 65
    for name, expected in recorded.items():
        found = random_case(int(name.removeprefix("random ")))[1]
        assert digest(found) == expected, f"record anew what was meant to change: {name}"
    # a control: one assignment more makes another digest
    assert digest(replace(found, max_load_ML=found.max_load_ML + 1)) != digest(found)

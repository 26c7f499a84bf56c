"""The lower bound against the best of all plans, found by trying every placement of replicas and every split."""

import itertools

import numpy as np
import pytest

from foreroute.plan import PlanOptions
from foreroute.planner import plan
from tests.plan.random_plans import LINKS, Topology


def best_split(load_E, hosts_E, num_ranks):
    """The least largest load of any split over these hosts: by minimum cuts, what only a set of ranks can serve."""
    least = 0
    for size in range(1, num_ranks + 1):
        for ranks in itertools.combinations(range(num_ranks), size):
            alone = sum(int(load) for load, hosts in zip(load_E, hosts_E, strict=True) if hosts <= set(ranks))
            least = max(least, -(-alone // size))
    return least


def best_plan(load_E, home_E, num_ranks, slots):
    """The least largest load of any plan."""
    best = None
    foreign = [[e for e in range(len(load_E)) if home_E[e] != g and load_E[e]] for g in range(num_ranks)]
    kept = [[c for k in range(slots + 1) for c in itertools.combinations(experts, k)] for experts in foreign]
    for chosen in itertools.product(*kept):
        hosts_E = [{int(home_E[e])} | {g for g in range(num_ranks) if e in chosen[g]} for e in range(len(load_E))]
        least = best_split(load_E, hosts_E, num_ranks)
        best = least if best is None else min(best, least)
    return best


@pytest.mark.parametrize(("num_ranks", "num_experts", "slots"), [(2, 4, 0), (2, 4, 1), (2, 6, 2), (3, 3, 1), (3, 6, 1)])
def test_no_plan_beats_it_and_it_is_mostly_reached(num_ranks, num_experts, slots):
    rng = np.random.default_rng(num_ranks * 100 + num_experts * 10 + slots)
    reached, cases = 0, 12
    for _ in range(cases):
        load_E = rng.integers(0, 30, num_experts) ** rng.integers(1, 3)
        home_E = rng.permutation(np.arange(num_experts) % num_ranks).astype(np.int16)
        counts = np.zeros((1, 1, num_ranks, num_experts), np.int32)
        counts[0, 0, 0] = load_E
        stated = plan(counts, Topology(num_ranks, num_ranks, slots, LINKS), home_LE=home_E[None]).bound_ML
        bound, best = int(stated[0, 0]), best_plan(load_E, home_E, num_ranks, slots)
        assert bound <= best
        assert bound >= -(-load_E.sum() // num_ranks)
        reached += bound == best
    assert reached >= cases // 2


def test_it_is_what_a_plan_states_and_above_the_mean_where_slots_are_few():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 4, (2, 3, 4, 8)).astype(np.int32)
    counts[:, :, :, 0] = 100
    found = plan(counts, Topology(4, 4, 0, LINKS))
    assert (found.bound_ML > counts.sum(axis=(2, 3)) / 4).all()
    assert (found.bound_ML == found.max_load_ML).all()  # without slots, homes are all there is
    assert (plan(counts, Topology(4, 4, 1, LINKS), PlanOptions(tolerance=0)).bound_ML < found.bound_ML).all()


def test_an_empty_cell_has_none():
    assert plan(np.zeros((1, 1, 2, 4), np.int32), Topology(2, 2, 1, LINKS)).bound_ML.tolist() == [[0.0]]

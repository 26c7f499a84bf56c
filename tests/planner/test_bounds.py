"""Every bound against all that can be done on small cells, and against linear programs."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from foreroute.errors import CountsError, TopologyError
from foreroute.plan import Links, StepPlan, Topology
from foreroute.planner import bounds as b

LINKS = Links(3.4e11, 4.5e10, 5e10, 2e-5, 5e-5)


def ceil(a, d):
    return -(-a // d)


def host_sets(num_ranks):
    return [s for n in range(1, num_ranks + 1) for s in combinations(range(num_ranks), n)]


def least_over_subsets(loads_E, hosts_E, num_ranks):
    """The minimum cut, by looking at all sets of ranks."""
    return max(
        ceil(sum(w for w, hosts in zip(loads_E, hosts_E, strict=True) if set(hosts) <= set(q)), len(q))
        for q in host_sets(num_ranks)
    )


def least_by_program(loads_E, expert_H, rank_H, num_ranks):
    """Minimise T over the served parts of hosts: all loads served, no rank above T. With whole loads T* rounds up."""
    num_hosts = len(expert_H)
    serve = np.zeros((len(loads_E), num_hosts + 1))
    serve[expert_H, np.arange(num_hosts)] = 1
    limit = np.zeros((num_ranks, num_hosts + 1))
    limit[rank_H, np.arange(num_hosts)] = 1
    limit[:, -1] = -1
    goal = np.zeros(num_hosts + 1)
    goal[-1] = 1
    answer = linprog(goal, A_ub=limit, b_ub=np.zeros(num_ranks), A_eq=serve, b_eq=loads_E, method="highs")
    return int(np.ceil(answer.fun - 1e-6))


small_loads = st.lists(st.integers(0, 30), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(loads=small_loads, num_ranks=st.integers(1, 3))
def test_one_copy_is_below_every_placement(loads, num_ranks):
    bound = b.one_copy([loads], num_ranks)[0]
    slowest = []
    for homes in product(range(num_ranks), repeat=len(loads)):
        held = np.bincount(homes, loads, num_ranks)
        slowest.append(held.max())
    assert bound <= min(slowest)
    if len(loads) <= num_ranks:
        assert bound == max(min(slowest), ceil(sum(loads), num_ranks))


@settings(max_examples=40, deadline=None)
@given(loads=st.lists(st.integers(0, 30), min_size=1, max_size=3), num_ranks=st.integers(1, 3), extra=st.integers(0, 4))
def test_slots_and_equal_splits_are_below_every_choice_of_hosts(loads, num_ranks, extra):
    slots = len(loads) + extra
    any_split, equal, shares = [], [], []
    for hosts in product(host_sets(num_ranks), repeat=len(loads)):
        if sum(map(len, hosts)) <= slots:
            any_split.append(least_over_subsets(loads, hosts, num_ranks))
            held = np.zeros(num_ranks)
            for w, ranks in zip(loads, hosts, strict=True):
                held[list(ranks)] += w / len(ranks)
            equal.append(held.max())
            shares.append(max(w / len(ranks) for w, ranks in zip(loads, hosts, strict=True)))
    assert b.slot_limited([loads], num_ranks, slots)[0] <= min(any_split)
    assert b.equal_split([loads], num_ranks, slots)[0] <= min(equal) + 1e-9
    assert b.equal_split([loads], num_ranks, slots)[0] == pytest.approx(max(min(shares), sum(loads) / num_ranks))


def test_slots_limit_what_replication_can_do():
    loads = [[90, 1, 1, 1]]
    assert [int(b.slot_limited(loads, 4, 4 + extra)[0]) for extra in (0, 1, 2, 3, 9)] == [90, 45, 30, 24, 24]
    assert b.equal_split(loads, 4, 6)[0] == 30
    assert b.equal_split([[90, 0]], 2, 9)[0] == 45  # one copy per rank, however many slots there are


@settings(max_examples=80, deadline=None)
@given(loads=small_loads, num_ranks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_fixed_placement_is_the_minimum_cut(loads, num_ranks, seed):
    rng = np.random.default_rng(seed)
    hosts = [rng.choice(num_ranks, rng.integers(1, num_ranks + 1), replace=False).tolist() for _ in loads]
    expert_H = np.repeat(np.arange(len(loads)), [len(h) for h in hosts])
    bound = b.fixed_placement([loads], expert_H, np.concatenate(hosts), [0, len(expert_H)], num_ranks)[0]
    assert bound == least_over_subsets(loads, hosts, num_ranks)


def random_hosts(rng, num_experts, num_ranks, replicas):
    """Contiguous homes and some replicas, as arrays."""
    hosts = {(e, e * num_ranks // num_experts) for e in range(num_experts)}
    while len(hosts) < num_experts + replicas:
        hosts.add((int(rng.integers(num_experts)), int(rng.integers(num_ranks))))
    expert_H, rank_H = np.array(sorted(hosts)).T
    shuffle = rng.permutation(len(expert_H))
    return expert_H[shuffle], rank_H[shuffle]


@pytest.mark.parametrize(("num_experts", "num_ranks", "replicas"), [(16, 4, 5), (64, 16, 20), (128, 32, 60)])
def test_fixed_placement_equals_the_linear_program_on_larger_cells(num_experts, num_ranks, replicas):
    rng = np.random.default_rng(num_experts)
    loads_CE = (rng.pareto(1.5, (8, num_experts)) * 300).astype(np.int64)
    loads_CE[3] = 0
    hosts = [random_hosts(rng, num_experts, num_ranks, replicas) for _ in range(8)]
    expert_H, rank_H = (np.concatenate(part) for part in zip(*hosts, strict=True))
    offsets = np.arange(9) * (num_experts + replicas)
    bound_C = b.fixed_placement(loads_CE, expert_H, rank_H, offsets, num_ranks)
    expected = [least_by_program(loads_CE[c], *hosts[c], num_ranks) for c in range(8)]
    assert bound_C.tolist() == expected
    assert (bound_C > b.perfect_mean(loads_CE, num_ranks)).any()
    assert (b.slot_limited(loads_CE, num_ranks, num_experts + replicas) <= bound_C).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 3), per_node=st.integers(1, 3))
def test_the_node_floor_is_what_replicating_everything_in_its_node_attains(seed, nodes, per_node):
    rng = np.random.default_rng(seed)
    topology = Topology(nodes * per_node, per_node, 0, LINKS)
    num_experts = topology.num_ranks * 2
    loads_CE = rng.integers(0, 50, (3, num_experts))
    home_CE = rng.permuted(np.tile(np.repeat(np.arange(topology.num_ranks), 2), (3, 1)), axis=1)
    floor_C = b.node_floor(loads_CE, home_CE, topology)
    expert_H = np.repeat(np.arange(num_experts), per_node)
    for c in range(3):
        rank_H = (home_CE[c] // per_node * per_node)[:, None] + np.arange(per_node)
        held = b.fixed_placement(loads_CE[c : c + 1], expert_H, rank_H.ravel(), [0, len(expert_H)], topology.num_ranks)
        assert floor_C[c] == max(held[0], ceil(int(loads_CE[c].sum()), topology.num_ranks))
        assert b.node_floor(loads_CE, home_CE[c], topology)[c] == floor_C[c]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_micro_steps=st.integers(1, 3))
def test_no_packing_gets_below_the_largest_rank_total(seed, num_micro_steps):
    rng = np.random.default_rng(seed)
    sequences_SE = rng.integers(0, 20, (4, 4))
    home_E = rng.permutation([0, 0, 1, 1])
    bound = b.any_packing([sequences_SE.sum(axis=0)], [home_E], 2)[0]
    sums = []
    for steps in product(range(num_micro_steps), repeat=4):
        loads_ME = np.zeros((num_micro_steps, 4), int)
        np.add.at(loads_ME, list(steps), sequences_SE)
        sums.append(sum(np.bincount(home_E, loads_E, 2).max() for loads_E in loads_ME))
    assert bound <= min(sums)
    assert num_micro_steps > 1 or bound == min(sums)


def test_the_best_split_of_a_plan_is_that_of_each_of_its_cells():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 30, (2, 3, 4, 8))
    home_LE = rng.permuted(np.tile(np.repeat(np.arange(4), 2), (3, 1)), axis=1).astype(np.int16)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, 6))])
    expert_R, rank_R = rng.integers(0, 8, offsets[-1]), rng.integers(0, 4, offsets[-1])
    rest = dict.fromkeys(("slot_R", "fetched_R", "tokens_RG", "max_load_ML", "bound_ML"), np.zeros(0))
    plan = StepPlan(
        Topology(4, 2, 2, LINKS), (2, 3, 8), home_LE, home_LE, offsets, expert_R, rank_R, counts_digest="", **rest
    )
    for (m, layer), best in np.ndenumerate(b.best_split(counts, plan)):
        part = slice(*offsets[m * 3 + layer : m * 3 + layer + 2])
        hosts = [[home_LE[layer, e], *rank_R[part][expert_R[part] == e]] for e in range(8)]
        assert best == least_over_subsets(counts[m, layer].sum(axis=0).tolist(), hosts, 4)


def test_cells_are_in_the_order_of_execution():
    counts = np.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)
    np.testing.assert_array_equal(b.cell_loads(counts)[1 * 3 + 2], counts[1, 2].sum(axis=0))


def test_empty_cells_and_whole_assignments():
    assert b.perfect_mean([[0, 0], [3, 2]], 2).tolist() == [0, 3]
    assert b.slot_limited([[0, 0]], 2, 2).tolist() == [0]
    assert b.equal_split([[0, 0]], 2, 4).tolist() == [0]
    assert b.fixed_placement([[0, 0]], [], [], [0, 0], 2).tolist() == [0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: b.perfect_mean([1, 2], 2), CountsError, r"shape \(2,\); expected integers \[cells, experts\]"),
        (lambda: b.perfect_mean([[1.5]], 2), CountsError, "dtype float64"),
        (lambda: b.one_copy([[-1]], 2), CountsError, "from 0"),
        (lambda: b.one_copy([[1]], 0), TopologyError, "num_ranks is 0"),
        (lambda: b.slot_limited([[1, 1]], 1, 1), TopologyError, "1 slots do not hold 2 experts"),
        (lambda: b.equal_split([[1, 1]], 1, 1), TopologyError, "1 slots do not hold 2 experts"),
        (lambda: b.fixed_placement([[1, 1]], [0], [0], [0, 1], 1), CountsError, "cell 0, an expert .* has no host"),
        (lambda: b.fixed_placement([[1]], [0], [0], [0, 2], 1), CountsError, "do not cut 1 hosts into 1 cells"),
        (lambda: b.fixed_placement([[1]], [0], [1], [0, 1], 1), CountsError, "expected one each, from 0 to 0"),
        (lambda: b.node_floor([[1]], [[2]], Topology(2, 1, 0, LINKS)), TopologyError, "not among the 2 ranks"),
    ],
)
def test_bounds_of_nonsense_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()

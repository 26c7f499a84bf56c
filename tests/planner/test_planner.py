"""The planner's door: valid plans, equal for any threads; and the planner of one cell in NumPy, equal bit for bit."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.errors import ConfigError, CountsError, PlanError, TopologyError
from foreroute.plan import Links, PlanOptions, Topology
from foreroute.plan.checker import verify
from foreroute.plan.plan_file import plan_to_bytes
from foreroute.planner import plan, plan_cell
from tests.plan.random_plans import LINKS, skewed_counts
from tests.planner.plan_digests import RECORDED, digest, random_case
from tests.tiers import grid


@pytest.mark.parametrize("slots", ["layer", "shared"])
@pytest.mark.parametrize("redundant", [0, 1, 3])
def test_plans_of_random_workloads_are_valid_and_the_same_for_any_number_of_threads(slots, redundant):
    for seed in range(36):
        options = PlanOptions(tolerance=(0.0, 0.02, 0.1)[seed // 6 % 3], slots=slots)
        ranks = (2, 4, 8)[seed % 3]
        cells = (9, 5) if seed < 3 else (3, 2)  # several for each of seven threads
        counts = skewed_counts(seed, (*cells, ranks, 16), 0.1 + seed % 4)
        topology = Topology(ranks, ranks // (1 + seed % 2), redundant, LINKS)
        found = plan(counts, topology, options)
        verify(found, counts, options)
        if seed < 3:
            again = [plan(counts, topology, replace(options, threads=threads)) for threads in (1, 2, 7)]
            assert set(map(plan_to_bytes, again)) == {plan_to_bytes(found)}


def test_bad_input_is_refused():
    topology = Topology(4, 2, 1, LINKS)
    counts = skewed_counts(5, (2, 1, 4, 16))
    with pytest.raises(CountsError, match=r"set num_ranks.*\[micro-steps"):  # as in tests/plan/test_counts.py
        plan(counts[:, :, :2], topology)
    for given, costs in ((None, None), ("cluster.toml", None), (topology, topology)):
        with pytest.raises(ConfigError, match=r"(topology|costs) is a .*load_cluster"):
            plan(counts, given, costs=costs)
    with pytest.warns(UserWarning, match="nearer"):
        plan(counts, replace(topology, links=Links(45e9, 340e9, 50e9, 2e-5, 5e-5)))
    with pytest.raises(CountsError, match=r"squares_MG.*\(2, 4\)"):
        plan(counts, topology, squares_MG=np.zeros((1, 4), np.int64))
    with pytest.raises(PlanError, match=r"'train'.*recompute"):
        plan(counts, topology).decision("train")
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


LEVEL = PlanOptions(tolerance=0.0, slots="shared")


def served_GE(cell, loads_E, num_ranks):
    """What ranks serve under a planned cell: replicas their tokens, homes the rest."""
    served = np.zeros((num_ranks, len(loads_E)), np.int64)
    served[cell.home_E, np.arange(len(loads_E))] = loads_E
    tokens_R = cell.tokens_RG.sum(axis=1)
    np.add.at(served, (cell.rank_R, cell.expert_R), tokens_R)
    np.subtract.at(served, (cell.home_E[cell.expert_R], cell.expert_R), tokens_R)
    return served


def heavy_tails(rng):
    """Ranks, slots, loads [M, E] and homes [E] of ten cells, most of which reach their bound at once."""
    num_ranks, num_experts, slots = (int(n) for n in (rng.integers(1, 9), rng.integers(1, 5), rng.integers(0, 4)))
    loads = rng.pareto(rng.choice([0.7, 1.5, 4, 30]), (10, num_experts * num_ranks)) * rng.choice([1, 30, 500, 20000])
    return num_ranks, slots, loads.clip(0, 1e7).astype(np.int64), rng.permutation(np.arange(loads.shape[1]) % num_ranks)


def short_of_slots(rng):
    """The same of two cells with hot experts side by side, of which some are searched from perturbed states."""
    num_ranks, num_experts, slots = (int(n) for n in (rng.integers(3, 9), rng.integers(2, 9), rng.integers(1, 3)))
    share = rng.dirichlet(np.full(num_ranks * num_experts, rng.choice([0.1, 0.3, 1.0])), 2)
    loads = rng.multinomial(rng.choice([100, 4000, 100000]), share)
    return num_ranks, slots, loads, np.argsort(np.argsort(loads[0])) // num_experts


def few_tokens(rng):
    """The same of ten cells whose loads are small whole numbers, where every rounding shows."""
    num_ranks, num_experts, slots = (int(n) for n in (rng.integers(2, 6), rng.integers(1, 4), rng.integers(0, 3)))
    loads = rng.integers(0, 4, (10, num_ranks * num_experts)) ** rng.integers(1, 4) * rng.integers(1, 4)
    return num_ranks, slots, loads, np.arange(loads.shape[1]) // num_experts


def compare(rng, draw, options):
    """Cells of a step, those that both planners plan otherwise, and those that miss their bound."""
    num_ranks, slots, loads_ME, home_E = draw(rng)
    counts = np.zeros((len(loads_ME), 1, num_ranks, loads_ME.shape[1]), np.int64)
    counts[:, 0] = loads_ME[:, None] // num_ranks
    counts[:, 0, -1] += loads_ME % num_ranks
    found = plan(counts, Topology(num_ranks, num_ranks, slots, LINKS), options, home_LE=home_E[None])
    differing = 0
    for m, loads_E in enumerate(loads_ME):
        served = plan_cell(loads_E, home_E, slots, seed=np.int64(m))
        differing += not np.array_equal(served, served_GE(found.cell(m, 0), loads_E, num_ranks))
        assert served.sum(axis=0).tolist() == loads_E.tolist()
        is_away = np.arange(num_ranks)[:, None] != home_E
        assert ((served > 0) & is_away).sum(axis=1).max() <= slots
    return np.array([len(loads_ME), differing, (found.max_load_ML > found.bound_ML).sum()])


@grid(("part", "fewest"), [(0, 2), (1, 4), (2, 4)], quick=1)
def test_the_compiled_planner_gives_the_same(part, fewest):
    steps = [(heavy_tails, 120), (few_tokens, 81), (short_of_slots, 24)]
    every = [compare(np.random.default_rng(n), draw, LEVEL) for draw, many in steps for n in range(part, many, 3)]
    cells, differing, missed = sum(every)
    assert cells == 686
    assert differing == 0
    assert missed >= fewest  # so that searches beyond the first were compared too


@pytest.mark.parametrize(
    ("loads", "homes", "slots", "error"),
    [
        ([1, -1], [0, 1], 1, CountsError),
        ([[1, 2]], [0, 1], 1, CountsError),
        ([2**31 - 1, 1], [0, 1], 1, CountsError),
        ([1, 2], [0, 1], -1, CountsError),
        ([1, 2], [0, 0, 1], 1, TopologyError),
        ([1, 2], [0, -1], 1, TopologyError),
    ],
)
def test_what_is_no_cell_is_refused(loads, homes, slots, error):
    with pytest.raises(error, match="expected"):
        plan_cell(loads, homes, slots)

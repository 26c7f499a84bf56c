"""The priced options, traffic and pay-off: valid plans, never slower, near the best of all where it is known."""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np

from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.costs.pricing import slowest_attention
from foreroute.plan import CellPlan, PlanOptions, Topology
from foreroute.plan.checker import verify
from foreroute.planner import plan
from foreroute.planner.priced import Window
from tests.costs.cost_oracle import price_cell, price_plan
from tests.plan.random_plans import LINKS, plan_of_cells, random_counts, random_plan
from tests.tiers import grid

SMALL = replace(MODELS["qwen3-30b-a3b"], top_k=2, num_experts=8)
COSTS = CostModel(model=SMALL, hardware=HARDWARE["h100"], dispatcher="dedup")


def _seconds(cell, counts_GE, topology, costs):
    return float(price_cell(cell, counts_GE, topology, costs).sum())


def _window(counts_MGE, topology, costs):
    """Micro-steps of one layer, whose slots keep what they hold."""
    counts, attention_M2 = counts_MGE.astype(np.int32), slowest_attention(counts_MGE, costs)
    return Window(counts, attention_M2, topology.redundant_slots, costs.prices(topology))


@grid("pay_off", [True, False], quick=1)
def test_steps_are_valid_and_never_slower(pay_off):
    """Than balanced plans of as many slots, and than static, whatever a fetch costs, in kept slots and shared ones."""
    faster, kept = Counter(), 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        num_ranks, ranks_per_node = [(4, 2), (8, 2), (4, 1), (16, 8), (3, 1)][seed % 5]
        links = replace(LINKS, cluster_bytes_per_s=float(10 ** rng.uniform(9, 11)))
        topology = Topology(num_ranks, ranks_per_node, int(rng.integers(1, 5)), links)
        shape = (int(rng.integers(1, 6)), 2, num_ranks, 48)
        counts_MLGE = random_counts(seed, shape, int(10 ** rng.uniform(0, 4))) * rng.integers(0, 3, (1, *shape[1:]))
        costs = replace(COSTS, dispatcher=("copies", "dedup")[seed % 2], paths=("host", "direct")[seed // 2 % 2])
        slots = "shared" if seed % 3 == 0 else "layer"
        options = PlanOptions(traffic=True, pay_off=pay_off, slots=slots)
        found = plan(counts_MLGE, topology, options, costs=costs)
        verify(found, counts_MLGE, options)
        others = [
            plan(counts_MLGE, topology, PlanOptions(traffic=False, slots=slots, **more), costs=costs)
            for more in ({"pay_off": pay_off}, {"replicas": False})
        ]
        every = (price_plan(each, counts_MLGE, costs, slots) for each in (found, *others))
        seconds_L, *others_L = (seconds_ML.sum(axis=0) for seconds_ML in every)
        assert (seconds_L <= others_L[0] * (1 + 1e-12)).all()
        if pay_off:
            assert (seconds_L <= others_L[1] * (1 + 1e-12)).all()
        faster[slots] += int((seconds_L < others_L[0] * 0.99).sum())
        kept += int((~found.hosts.fetched_R).sum())
    assert faster["layer"] > 25
    assert faster["shared"] > 10
    assert kept > 250


def _best_step_seconds(counts_MGE, home_E, topology, costs):
    """The fastest of all steps where every node is one rank: what its slots get and when, by dynamic programming.

    Own tokens are served at a replica or at home, all others at home.
    """
    num_ranks, num_experts = counts_MGE.shape[1:]

    def choices(rank, held):
        """What the rank uses, what it fetches for that, and what it holds then: as much as there is room for."""
        foreign = [e for e in range(num_experts) if home_E[e] != rank]
        for size in range(topology.redundant_slots + 1):
            for used in itertools.combinations(foreign, size):
                left = sorted(held - set(used))
                for stays in itertools.combinations(left, min(len(left), topology.redundant_slots - size)):
                    yield used, tuple(e not in held for e in used), frozenset(used + stays)

    @functools.cache
    def cell_s(m, used_G, fetched_G):
        pairs = [(e, rank) for rank, used in enumerate(used_G) for e in used]
        expert_R, rank_R = np.array(pairs, np.int16).reshape(-1, 2).T
        tokens_RG = np.zeros((len(pairs), num_ranks), np.int32)
        for r, (e, rank) in enumerate(pairs):
            tokens_RG[r, rank] = counts_MGE[m, rank, e]
        fetched_R = np.array([each for fetched in fetched_G for each in fetched], np.bool_)
        cell = CellPlan(home_E, expert_R, rank_R, np.full_like(rank_R, -1), fetched_R, tokens_RG)
        return _seconds(cell, counts_MGE[m], topology, costs)

    best = {(frozenset(),) * num_ranks: 0.0}
    for m in range(len(counts_MGE)):
        after = {}
        for held_G, before_s in best.items():
            for chosen in itertools.product(*(choices(rank, held) for rank, held in enumerate(held_G))):
                used_G, fetched_G, then_G = zip(*chosen, strict=True)
                seconds = before_s + cell_s(m, used_G, fetched_G)
                after[then_G] = min(after.get(then_G, np.inf), seconds)
        best = after
    return min(best.values())


@grid(("ranks", "slots"), [(2, 2), (3, 1)], quick=1)
def test_near_the_best_of_all_steps(ranks, slots):
    """Over links from fast to slow. Loads are left free, so that the choice of replicas alone is judged."""
    gaps, gains = [], []
    for seed in range(9):
        rng = np.random.default_rng(seed)
        lasting_GE, passing_MGE = rng.gamma(0.5, size=(ranks, 6)), rng.gamma(1.0, size=(4, ranks, 6))
        counts_MGE = (lasting_GE * passing_MGE * 4000).astype(np.int64)
        links = replace(LINKS, cluster_bytes_per_s=(45e9, 10e9, 2e9)[seed % 3])
        topology = Topology(ranks, 1, slots, links)
        costs = replace(COSTS, dispatcher=("copies", "dedup")[seed % 2])
        alone = [CellPlan.homes_only(topology.contiguous_home_LE(1, 6)[0], ranks)] * len(counts_MGE)
        found = _window(counts_MGE, topology, costs).against_traffic(alone, 2.0)
        found_s, static_s = (
            sum(_seconds(cell, counts_GE, topology, costs) for cell, counts_GE in zip(cells, counts_MGE, strict=True))
            for cells in (found, alone)
        )
        gaps.append(found_s / _best_step_seconds(counts_MGE, alone[0].home_E, topology, costs) - 1)
        gains.append(static_s / found_s)
    assert np.mean(gains) > 1.2
    assert np.mean(gaps) < 0.03
    assert max(gaps) < 0.12


def test_declining_is_never_slower_and_keeps_slots_true():
    """The independent checker knows what each slot holds; a declined fetch may be needed by a later micro-step."""
    declined = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        num_ranks, ranks_per_node = [(4, 2), (8, 4), (4, 4)][seed % 3]
        links = replace(LINKS, host_bytes_per_s=float(10 ** rng.uniform(8, 11)), cluster_bytes_per_s=1e10)
        topology = Topology(num_ranks, ranks_per_node, 2, links)
        counts_MLGE = random_counts(seed, (4, 2, num_ranks, 8), 2000)
        slots, size = ("layer", 4) if seed % 2 else ("shared", 1)
        before = random_plan(counts_MLGE, topology, seed=seed, keep=0.6, sharing=slots)
        costs, cells = replace(COSTS, paths=("host", "direct")[seed // 2 % 2]), {}
        for begin, layer in itertools.product(range(0, 4, size), range(2)):
            places = [(m, layer) for m in range(begin, begin + size)]
            window = _window(counts_MLGE[begin : begin + size, layer], topology, costs)
            cells.update(zip(places, window.pruned([before.cell(*place) for place in places]), strict=True))
        after = [cells[place] for place in np.ndindex(4, 2)]
        verify(plan_of_cells(after, before.home_LE, counts_MLGE, topology, slots), counts_MLGE)
        declined += len(before.hosts.expert_R) - sum(len(cell.expert_R) for cell in after)
        if slots == "shared":  # every cell stands alone
            for place, cell in zip(np.ndindex(4, 2), after, strict=True):
                seconds = [_seconds(one, counts_MLGE[place], topology, costs) for one in (cell, before.cell(*place))]
                assert seconds[0] <= seconds[1] * (1 + 1e-12)
    assert declined > 100

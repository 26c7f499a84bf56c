"""The page: what it says follows from the results, and nothing else."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments import unevenness
from experiments.__main__ import PAGE, RESULTS
from experiments.arms import Arms, Measure, at
from experiments.claimed import claims
from experiments.claims import judged
from experiments.grid import FEW, FRESH, SEEDS, grid
from experiments.intervals import paired_difference
from experiments.page import figures_text, page_text
from experiments.page_tables import tables
from experiments.plots import PICTURES
from experiments.runner import current

ROUTES = "H/routes"
KEPT = current(grid(), RESULTS)


def decided(results):
    return {row.claim: row for row in judged(claims(), Arms(results))}


def test_claims_are_decided_by_the_arms_that_they_name():
    before = decided(KEPT)
    for claim, row in before.items():
        seeds = FRESH if "fresh seeds" in claim else FEW if "400 steps" in claim or "vLLM" in claim else SEEDS
        assert row.seeds == len(seeds), claim
    better = {name: deepcopy(line) for name, line in KEPT.items() if line["arm"] == "B/R3/plain/8"}
    for line in better.values():
        line["figures"]["reward_last"] += 1 + 0.001 * (line["seed"] % 2)
    after = {claim: row.verdict for claim, row in decided(KEPT | better).items()}
    assert {claim: verdict for claim, verdict in after.items() if verdict != before[claim].verdict} == {
        "R3 raises the reward (8 mini-batches)": "holds",
        "R3 is the better replay at 8 mini-batches (Qwen)": "holds",
        "R3 is better than GSPO (8 mini-batches; asked after the runs)": "holds",
        "TIS on top of R3 is worse than R3 (8 mini-batches)": "holds",
        "R3 is better than TIS (8 mini-batches)": "holds",
        "Ten times the steps raise the reward with R3 (8 mini-batches, 400 steps)": "the opposite",
    }


def test_the_page_in_the_documentation_is_that_of_the_results():
    folder = PAGE.with_suffix("")
    pictures = {name: words for name, (_, words) in PICTURES.items() if (folder / f"{name}.svg").exists()}
    expected = page_text(grid(), KEPT, pictures, PAGE.stem)
    assert Path(PAGE).read_text() == expected, "redraw it with: python -m experiments page"
    assert RESULTS.with_suffix(".md").read_text() == figures_text(grid(), KEPT)


def test_what_the_page_says_in_short_rests_on_verdicts():
    found = {claim: row.verdict for claim, row in decided(KEPT).items()}
    fresh = "(8 mini-batches, fresh seeds)"
    said = {
        "holds": [
            "Routing causes the excess: R3 lowers the mismatch (bfloat16)",
            "Routing causes the excess: R3 lowers the mismatch (fp8)",
            "R3 keeps the mismatch low through RL (8 mini-batches)",
            "R3 spares the run gradient spikes (8 mini-batches, fresh seeds; asked after the runs)",
            "R3 steadies the gradient norm (8 mini-batches, fresh seeds; asked after the runs)",
            "Shifted routes do harm in RL (8 mini-batches)",
            "The load of a step is stable from step to step (ForeMoE)",
            "Micro-steps fluctuate strongly (1 sequence a rank; ForeMoE)",
            *(claim for claim in found if "Routes known beforehand level them" in claim),
        ],
        "the opposite": [
            *(claim for claim in found if "most of it is the number of sequences" in claim),
            "The step before does not level micro-steps (8 sequences a rank; ForeMoE)",
        ],
        "not shown": [
            "R3 steadies the entropy (8 mini-batches, fresh seeds; asked after the runs)",
            *(claim for claim in found if "reward (8 mini-batches, base start)" in claim),
            f"Mismatch costs reward {fresh}",
            f"R3 raises the reward {fresh}",
            *(claim for claim in found if "is the better replay" in claim or "TIS" in claim),
        ],
    }
    for verdict_said, those in said.items():
        assert {claim: found[claim] for claim in those} == dict.fromkeys(those, verdict_said)


def test_what_the_page_says_of_loads_rests_on_figures():
    arms = Arms(KEPT)

    def mean(*path):
        return arms.mean(Measure(ROUTES, at(*path))).mean

    swings = []
    for setting in ("8x1", "8x8"):
        ways = ("workload", "mixed", "synthetic", "calibrated")
        drawn, mixed, made_up, calibrated = (
            [mean(of, setting, name) for name in ("swing", "step_change")] for of in ways
        )
        swings.append(drawn[0] / mixed[0])
        assert drawn[1] > 3 * mixed[1]
        assert all(2 / 3 < ours / real < 4 / 3 for ours, real in zip(made_up, mixed, strict=True))
        imbalances = [mean(of, setting, "imbalance") for of in ("calibrated", "mixed")]
        assert (calibrated[0], imbalances[0]) == pytest.approx((mixed[0], imbalances[1]), rel=0.08)
        assert calibrated[1] < 1.5 * mixed[1]
    assert mean("simulated", "foreroute") == pytest.approx(mean("workload_simulated", "foreroute"), rel=0.03)
    assert mean("simulated", "eplb_previous") > 1.05 * mean("workload_simulated", "eplb_previous")
    rows = [[row[0], *(cell.partition(" ")[0] for cell in row[1:])] for row in tables()["simulated"].lines(arms)]
    text = (PAGE.parent / "simulate.md").read_text()
    assert "\n".join(f"| {' | '.join(row)} |" for row in rows) in text
    assert f"swing {swings[0]:.1f} to {swings[1]:.1f} times as much" in text


VALUES = {0: 0.71, 1: 0.78, 2: 0.64, 3: 0.9, 4: 0.66}
OTHERS = {4: 0.5, 2: 0.61, 1: 0.8, 7: 3.0, 0: 0.4}


def test_paired_differences_are_scipys_over_the_seeds_of_both():
    seeds = [0, 1, 2, 4]
    found = paired_difference(VALUES, OTHERS)
    test = stats.ttest_rel([VALUES[s] for s in seeds], [OTHERS[s] for s in seeds])
    expected = test.confidence_interval(0.95)
    assert found.seeds == 4
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def by_loops(steps, num_ranks):
    """Written out for one layer, from counts [M, 1, G, E] of two steps."""
    first, second = ([float(n) for n in counts.sum(axis=(0, 1, 2))] for counts in steps)
    now, before = np.array(second) / sum(second), np.array(first) / sum(first)
    swings, uneven = [], []
    for counts in steps:
        share = counts.sum(axis=(0, 1, 2)) / counts.sum()
        for part in counts:
            loads = part.sum(axis=(0, 1))
            swings.append(sum(max(0.0, x) for x in loads / loads.sum() - share))
            by_rank = [sum(loads[g * 16 // num_ranks : (g + 1) * 16 // num_ranks]) for g in range(num_ranks)]
            uneven.append(max(by_rank) / np.mean(by_rank))
    correlation = np.mean((now - now.mean()) * (before - before.mean())) / now.std() / before.std()
    return correlation, sum(max(0.0, x) for x in now - before), np.mean(swings), np.mean(uneven)


def test_unevenness_is_what_loops_say():
    rng = np.random.default_rng(0)
    steps = [rng.poisson(rng.pareto(2.0, (3, 1, 1, 16)) * 40 + 1, (3, 1, 4, 16)) for _ in range(2)]
    found = unevenness.unevenness(steps)
    names = ("step_correlation", "step_change", "swing", "imbalance")
    assert [found[name] for name in names] == pytest.approx(by_loops(steps, 4), rel=1e-3)

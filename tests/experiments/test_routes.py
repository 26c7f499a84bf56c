"""Routes that were really made: what the texts hold, what is measured of loads, and a cell of a model of a second."""

import numpy as np
import pytest

from benchmarks.balancers import OTHER_BALANCERS
from experiments import balancing, unevenness
from experiments.cells import Cell
from experiments.models import base_values
from experiments.routes import recorded, run_routes
from experiments.unevenness import (
    dealt,
    sequence_counts,
)
from foreroute.plan.counts import contiguous_imbalance
from foreroute.trace import load

SMALL = {
    "model": {"sizes": {"hidden_size": 16, "num_hidden_layers": 2, "moe_intermediate_size": 8}},
    "warm_start": {"max_steps": 3},
    "rollout": {"prompts": 32},
    "rl": {"steps": 2},
}


@pytest.mark.parametrize("order", ["mixed", "even", "sorted"])
def test_every_sequence_is_dealt_once(order):
    kind_S = np.arange(64) // 2 % 4
    (counts,) = dealt([np.eye(64, dtype=int)[:, None]], kind_S, order, 4, 2, seed=3)  # expert s is sequence s alone
    assert counts.shape == (8, 1, 4, 64)
    assert (counts.sum(axis=(0, 1, 2)) == 1).all()
    assert (counts.sum(axis=(1, 3)) == 2).all()
    kinds_of = [np.bincount(kind_S[np.flatnonzero(part.sum(axis=(0, 1)))], minlength=4) for part in counts]
    if order == "even":
        assert all(kinds.tolist() == [2, 2, 2, 2] for kinds in kinds_of)
    else:
        assert all((kinds.max() == 8) == (order == "sorted") for kinds in kinds_of)
    assert dealt([np.ones((64, 1, 8), int)], kind_S, order, 8, 5, seed=3)[0].shape == (1, 1, 8, 8), "the rest is left"


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
    apart = np.zeros((2, 1, 1, 16), int)
    apart[0, ..., :8] = apart[1, ..., 8:] = np.arange(1, 9)
    variance = 16**2 * 2 * sum((n / 36 / 2) ** 2 for n in range(1, 9)) / 16
    found = unevenness.unevenness([apart] * 2)
    assert (found["swing"], found["variance"]) == (0.5, pytest.approx(variance, rel=1e-4))


@pytest.mark.slow
def test_a_cell_keeps_its_traces_and_measures_them(tmp_path, monkeypatch):
    monkeypatch.delitem(OTHER_BALANCERS, "laer")  # takes long to compile
    for module in (unevenness, balancing):
        monkeypatch.setattr(module, "SEQUENCES", (1, 8))
    cell = Cell("H/routes", "routes", 0, "routes", SMALL)
    base = base_values("routes")
    found = run_routes(cell, base, tmp_path)
    (folder,) = tmp_path.iterdir()
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(written) == ["learned.json", "step-0.safetensors", "step-1.safetensors"]
    assert found["mixed"]["8x1"]["swing"] > found["shuffled"]["8x1"]["swing"] > 0
    assert found["balanced"].keys() == {"8x1", "8x8"}
    balanced = found["balanced"]["8x8"]
    assert balanced["static"]["imbalance"] >= balanced["llep"]["imbalance"] >= balanced["llep_free"]["imbalance"] >= 1
    assert balanced["static"]["fetches"] == 0 < balanced["eplb_last"]["fetches"]
    counts = [sequence_counts(load(folder / f"step-{step}.safetensors")) for step in range(2)]
    _, last = dealt(counts, np.arange(128) // 4 % 4, "mixed", 8, 8, seed=0)
    at_home = contiguous_imbalance(last.sum(axis=2), 8)
    assert balanced["static"]["imbalance"] == pytest.approx(at_home, rel=1e-4), "of all steps but the first"
    assert found["simulated"]["static"] == 1 < found["simulated"]["ours"]
    recorded(cell, base, tmp_path)
    assert written == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

"""Routes that were really made: what the texts hold, what is measured of loads, and a cell of a model of a second."""

import re

import numpy as np
import pytest

from benchmarks.balancers import OTHER_BALANCERS, after
from experiments import balancing, unevenness
from experiments.cells import Cell
from experiments.models import base_values, merged
from experiments.routes import recorded, run_routes
from experiments.texts import KINDS, LONGEST, SHORTEST, TextTask, encode, text
from experiments.unevenness import (
    dealt,
    kind_information,
    kind_share,
    sequence_counts,
)
from foreroute.plan import Topology
from foreroute.plan.counts import contiguous_imbalance
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.methods import BALANCERS
from foreroute.trace import load
from tests.plan.random_plans import LINKS

SMALL = {
    "model": {"sizes": {"hidden_size": 16, "num_hidden_layers": 2, "moe_intermediate_size": 8}},
    "warm_start": {"max_steps": 3},
    "rollout": {"prompts": 32},
    "rl": {"steps": 2},
}


def test_texts_are_what_their_kinds_say():
    rng = np.random.default_rng(0)
    for kind in KINDS:
        texts = [text(kind, rng) for _ in range(20)]
        assert all(SHORTEST <= len(each) <= LONGEST for each in texts)
        assert len(set(texts)) == 20
        assert all(bytes(encode(each).astype(np.uint8)).decode() == each for each in texts)
    texts = [text("arithmetic", rng) for _ in range(9)]
    whole = [line for each in texts for line in re.findall(r"^(\d+[-+*]\d+)=(-?\d+)\n", each, re.MULTILINE)]
    assert len(whole) > 20
    assert all(eval(sum_) == int(result) for sum_, result in whole)


def test_rewards_are_shares_of_the_next_characters():
    task = TextTask()
    problems = task.problems(8, 0, np.random.default_rng(0))
    assert [problem.row["kind"] for problem in problems] == [*KINDS, *KINDS]
    answer = problems[0].row["answer"]
    wrong = answer[:2] + chr(ord(answer[2]) + 1) + answer[3:]
    responses = [np.append(encode(text), np.int32(0)) for text in (answer, wrong, "")]
    assert task.rewards(problems[:1] * 3, responses).tolist() == [1, 0.25, 0]


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


def test_what_kinds_explain():
    kind_S = np.arange(40) % 4
    own = np.repeat(np.eye(4, dtype=int)[kind_S][:, None] * 30, 2, axis=1)
    assert [kind_information(each, kind_S) for each in (own, np.full((40, 2, 4), 7))] == [2, 0]
    rng = np.random.default_rng(1)
    mixed = own + rng.poisson(20, own.shape)
    shares = mixed / mixed.sum(axis=2, keepdims=True)
    within = sum(((shares[kind_S == k] - shares[kind_S == k].mean(axis=0)) ** 2).sum(axis=(0, 2)) for k in range(4))
    whole = ((shares - shares.mean(axis=0)) ** 2).sum(axis=(0, 2))
    assert kind_share(mixed, kind_S) == pytest.approx((1 - within / whole).mean())
    assert kind_share(mixed, rng.permutation(kind_S)) < 0.3 < kind_share(mixed, kind_S)


@pytest.mark.slow
def test_history_is_the_micro_step_before():
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.pareto(2.0, (3, 2, 1, 16)) * 40, (3, 2, 8, 16))
    topology = Topology(8, 8, 2, LINKS)
    home_LE = np.tile(topology.contiguous_home_E(16), (2, 1))
    found = iter(after(counts[2].sum(axis=1))(BalancerInput(counts, topology, home_LE)))
    for before, now in zip((counts[2], *counts[:2]), counts, strict=True):
        alone = BalancerInput(now[None], topology, home_LE, before.sum(axis=1))
        for layer, expected in enumerate(BALANCERS["eplb_previous"].method(alone)):
            # which of its hosts an expert calls its home is another matter
            assert np.array_equal(next(found).loads_G(now[layer]), expected.loads_G(now[layer]))


@pytest.mark.slow
def test_a_cell_keeps_its_traces_and_measures_them(tmp_path, monkeypatch):
    monkeypatch.delitem(OTHER_BALANCERS, "laer")  # takes long to compile
    for module in (unevenness, balancing):
        monkeypatch.setattr(module, "SEQUENCES", (1, 8))
    cell = Cell("H/routes", "routes", 0, "routes", SMALL)
    base = base_values("routes")
    found = run_routes(cell, base, tmp_path)
    (folder,) = tmp_path.iterdir()
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["learned.json", "step-0.safetensors", "step-1.safetensors"]
    written = [path.stat().st_mtime_ns for path in folder.iterdir()]
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
    assert written == [path.stat().st_mtime_ns for path in folder.iterdir()]
    other = Cell("H/routes", "routes", 0, "routes", merged(SMALL, {"rl": {"learning_rate": 1e-5}}))
    assert other.digest(base) not in folder.name
